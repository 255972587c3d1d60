#!/usr/bin/env bash
# Sets up what the tests need and runs them; arguments go to pytest.
#
#   bash tests/run.sh                       lint, and all tests this machine can run; those with the older generation
#                                           of SGLang only as far as one process shows it, to stay within half an hour
#   bash tests/run.sh -k rewards            those of the rewards alone
#   bash tests/run.sh -m sglang             those with the real SGLang, on a CPU, with each API generation it has
#   bash tests/run.sh -m long               those of a minute or more, which the first line leaves out: several machines,
#                                           clusters, wrong input under torchrun, engines that are killed (ten minutes)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=examples/environment.sh
source "$root/examples/environment.sh" test
# shellcheck source=tests/sglang_cpu/environment.sh
source "$root/tests/sglang_cpu/environment.sh"
cd "$root"
# A second thread gains nothing on models this small, and loses much where something else runs.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

with_sglang() {
    echo "SGLang $1"
    (use_sglang "$1" && python -m pytest "${@:2}")
}

read -r newest older <<< "$sglang_versions"
if [ "$*" = "-m long" ]; then
    python -m pytest "$@"
    with_sglang "$newest" -m "sglang and long"
elif [[ " $* " == *" -m sglang "* ]]; then
    for version in $sglang_versions; do
        with_sglang "$version" "$@"
    done
elif [ $# -gt 0 ]; then
    python -m pytest "$@"
else
    ruff check .
    ruff format --check .
    python -m pytest -m "not long"
    with_sglang "$newest" -m "sglang and not long"
    for version in $older; do
        with_sglang "$version" -m "sglang and not long" -k "not every_engine and not dies_or_hangs and not lives_through"
    done
fi
