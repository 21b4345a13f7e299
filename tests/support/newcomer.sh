#!/bin/sh
# Type README.md and pages of docs/ in a bare environment, from a wheel of this checkout: newcomer.py says how.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d "${TMPDIR:-/tmp}/newcomer-XXXXXX")
echo "in $folder"
python3 -m venv "$folder/build"
"$folder/build/bin/pip" wheel -q --no-deps -w "$folder" "$root"
cd "$root"
exec python3 -m tests.support.newcomer "$folder"/resharder-*.whl "$folder"
