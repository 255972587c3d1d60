#!/usr/bin/env bash
# GRPO learns Countdown: combine the given numbers into the target.
#
#   bash examples/run_countdown.sh                     on this machine, from nothing: a small policy, two CPU cores
#   PRESET=direct|search|hard bash examples/...        quick (one try), the default, or one not solved in ten minutes
#   PRESET=large NPROC=2 bash examples/...             on GPUs with SGLang: 76 M parameters, a harder game, 4 minutes
#   MODEL=Qwen/Qwen2.5-3B-Instruct NPROC=4 bash examples/run_countdown.sh
#                                                      on GPUs with SGLang, from a model of the hub or a folder
#
# Arguments are settings (key=value) of the training. NAME=... names the run (countdown), SEED=... seeds it (0), and
# NPROC=... is the number of processes that train (1). A second start moves what the first one left to
# NAME/grpo.previous-1 and so on; with checkpoint.resume=true it goes on with it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
preset=${PRESET:-search}
extras=""
if [ -n "${MODEL:-}" ] || [ "$preset" = large ]; then
    extras=sglang
fi
# shellcheck source=examples/environment.sh
source "$root/examples/environment.sh" "$extras"
cd "$root"

read_launch "$@"

if [ -n "${MODEL:-}" ]; then
    data=runs/countdown-text
    if missing "$data/train.jsonl"; then
        python examples/countdown.py "$data" --text --seed "$seed"
    fi
    trainer train examples/countdown_gpu.yaml "model.path=$MODEL" "data.train=$data/train.jsonl" \
        "data.eval=$data/heldout.jsonl" "seed=$seed" "tracking.name=${NAME:-countdown-gpu}" \
        "checkpoint.overwrite=$overwrite" "$@"
else
    configs=examples/countdown
    case $preset in
    search | direct | hard) warm_start=${configs}_sft.yaml grpo=${configs}_cpu.yaml ;;
    large) warm_start=${configs}_large_sft.yaml grpo=${configs}_large.yaml ;;
    *) fail "PRESET=$preset is not a preset: use search, direct, hard or large." ;;
    esac
    name=${NAME:-countdown}
    from_nothing "python examples/countdown.py --preset $preset" "$warm_start" "$grpo" "$@"
fi
tell_environment
