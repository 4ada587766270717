#!/usr/bin/env bash
# proto/ → dispatch/pb: proto.sh [FOLDER to write dispatch/pb under, default the checkout]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
mkdir -p "$out/dispatch/pb"
touch "$out/dispatch/pb/__init__.py"
python -m grpc_tools.protoc -I dispatch/pb=proto/dispatch/v1 --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" dispatch/pb/engine.proto
