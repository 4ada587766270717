#!/usr/bin/env bash
# Every check, each with its time: check.sh all | fast. Stops at the first failure.
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" PYTHONWARNINGS=ignore::DeprecationWarning
times=()
step() { # step NAME COMMAND…
  local name=$1 start=$SECONDS; shift
  printf '\n== %s\n' "$name"
  "$@" || { printf '\nFAILED: %s (%s)\n' "$name" "$*"; exit 1; }
  times+=("$((SECONDS - start)) s  $name")
}
drift() { # exporting and cleaning again must change nothing
  local scratch=.pytest_cache/drift
  rm -rf $scratch && mkdir -p $scratch
  cp -r settings.ini _quarto.yml nbs dispatch $scratch/
  (cd $scratch && nbdev_export && nbdev_clean) || return 1
  diff -r -x __pycache__ dispatch $scratch/dispatch && diff -r -x .ipynb_checkpoints nbs $scratch/nbs ||
    { echo "the package is not what the notebooks export; run \`make export\` and commit both"; return 1; }
  bash tools/proto.sh "$PWD/$scratch/stubs" && diff -r -x __pycache__ dispatch/pb $scratch/stubs/dispatch/pb ||
    { echo "dispatch/pb is not what proto/ gives; run \`make export\` and commit both"; return 1; }
  python tools/readme.py --check
}
nbval() { # nbval wants the execution counts that nbdev_clean removes, so it gets copies that have them
  rm -rf .pytest_cache/nbval && mkdir -p .pytest_cache/nbval
  python - <<'EOF' && pytest -q --no-header --nbval-lax -p no:cacheprovider .pytest_cache/nbval
import pathlib, nbformat
for path in [*pathlib.Path("nbs/phases").glob("*.ipynb"), pathlib.Path("nbs/index.ipynb")]:
    nb = nbformat.read(path, as_version=4)
    for i, cell in enumerate((c for c in nb.cells if c.cell_type == "code"), 1): cell.execution_count = i
    nbformat.write(nb, pathlib.Path(".pytest_cache/nbval", path.name))
EOF
}
interpreted() { if python -c 'import sys, torch; sys.exit(torch.cuda.is_available())'; then TRITON_INTERPRET=1 "$@"; else "$@"; fi; }

step "ruff" ruff check .
step "mypy --strict" mypy
step "export drift" drift
if [ "${1:-all}" = fast ]; then
  step "pytest, quick tests" interpreted pytest -q -m "not slow" --no-header
else
  step "nbdev_test" interpreted nbdev_test --n_workers 2 --do_print --timing
  step "pytest with coverage" interpreted pytest --no-header --cov --cov-report=term:skip-covered --durations=10
  step "nbval, pages read committed rows" nbval
fi
printf '\nSlowest steps:\n'; printf '%s\n' "${times[@]}" | sort -rn | sed 's/^/  /'
