#!/usr/bin/env bash
# Writes the generated code beside the .proto files. Run by `make proto`, in a venv with the `proto` dependency group.
set -eu
cd "$(dirname "$0")"
"${PYTHON:-python3}" -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. resharder/v1/*.proto
