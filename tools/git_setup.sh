#!/usr/bin/env bash
# Git for notebooks: nbdev's merge driver and hooks, jupytext's text diff. Touches this clone only: nbdev also writes a Jupyter
# configuration to the home folder, so it gets one inside .venv, which `make lab` uses.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .venv/home
HOME="$PWD/.venv/home" nbdev_install_hooks > /dev/null
git config --local merge.nbdev-merge.driver ".venv/bin/nbdev_merge %O %A %B %P"
git config --local diff.jupytext.textconv "sh -c '.venv/bin/jupytext --quiet --to py:percent --output - \"\$0\" 2>/dev/null'"
printf '#!/bin/sh\n.venv/bin/nbdev_trust\n' > .git/hooks/post-merge
git checkout -q -- .gitattributes 2>/dev/null || true
