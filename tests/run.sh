#!/usr/bin/env bash
# Sets up what the tests need and runs them; arguments go to pytest.
#
#   bash tests/run.sh                       lint, and all tests this machine can run
#   bash tests/run.sh -k rewards            those of the rewards alone
#   bash tests/run.sh -m sglang             those with the real SGLang, on a CPU, with each API generation it has
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=examples/environment.sh
source "$root/examples/environment.sh" test
# shellcheck source=tests/sglang_cpu/environment.sh
source "$root/tests/sglang_cpu/environment.sh"
cd "$root"

with_sglang() {
    local version
    for version in $sglang_versions; do
        echo "SGLang $version"
        (use_sglang "$version" && python -m pytest "$@")
    done
}

if [[ " $* " == *" -m sglang "* ]]; then
    with_sglang "$@"
elif [ $# -gt 0 ]; then
    python -m pytest "$@"
else
    ruff check .
    ruff format --check .
    python -m pytest
    with_sglang -m sglang
fi
