#!/usr/bin/env bash
# Sets up what the tests need and runs them; arguments go to pytest.
#
#   bash tests/run.sh                       lint, and all tests this machine can run
#   bash tests/run.sh -k rewards            those of the rewards alone
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=examples/environment.sh
source "$root/examples/environment.sh" test
cd "$root"
if [ $# -eq 0 ]; then
    ruff check .
    ruff format --check .
fi
python -m pytest "$@"
