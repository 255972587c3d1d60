#!/usr/bin/env bash
# Experiments on five lessons of small-scale GRPO, with the embedded Countdown example; docs/lessons.md tells them.
#
#   bash examples/experiments/run.sh [OUT]             all of it below OUT (runs/lessons), figures and data into docs/
#   JOBS=8 DEVICE=cuda bash examples/...               eight trainings side by side (1), on auto, cpu or cuda (auto)
#   STEPS=2 DOCS=/tmp/docs bash examples/...           shorter trainings (33; from the weak start four times that), figures and data to another folder
#
# WARM_STEPS (1400) and WEAK_STEPS (150) are the steps of the two warm starts, PROMPTS (256) what the gradient is
# measured on. What is done already is left as it is: a second start goes on where the first one ended. OUT/NAME.log has
# what a run printed, OUT/tables.md the numbers.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=examples/environment.sh
source "$root/examples/environment.sh" ""
out=$(realpath -m "${1:-$root/runs/lessons}")
docs=$(realpath -m "${DOCS:-$root/docs}")
cd "$root"
jobs=${JOBS:-1} device=${DEVICE:-auto} steps=${STEPS:-33}
for count in JOBS="$jobs" STEPS="$steps"; do
    [[ $count =~ =[1-9][0-9]*$ ]] || fail "$count is not a number: use 1 or more."
done
[[ $device =~ ^(auto|cpu|cuda)$ ]] || fail "DEVICE=$device is not a device: use auto, cpu or cuda."

# Name, warm start, how many times STEPS, settings; each is trained with the seeds 0 and 1. The longest go first.
runs="
sparse         weak  4  rewards.options.countdown.valid=0  rewards.options.countdown.format=0
format         weak  4  rewards.options.countdown.valid=0  rewards.options.countdown.format=0  rewards.weights.well_formed=0.2
batch-4        warm  1  batch.prompts_per_step=4
batch-8        warm  1  batch.prompts_per_step=8
batch-16       warm  1  batch.prompts_per_step=16
batch-32       warm  1  batch.prompts_per_step=32
plain          warm  1  batch.minibatches_per_step=4
entropy-0.01   warm  1  batch.minibatches_per_step=4  algorithm.entropy_coefficient=0.01
entropy-0.05   warm  1  batch.minibatches_per_step=4  algorithm.entropy_coefficient=0.05
clip-0.28      warm  1  batch.minibatches_per_step=4  algorithm.clip_high=0.28
clip-0.4       warm  1  batch.minibatches_per_step=4  algorithm.clip_high=0.4
"
# Float32 on every device, and not compiled: on so small a model that takes longer than it saves.
common="device=$device model.dtype=float32 actor.compile=false tracking.folder=$out"
# The share of well-formed answers is reported everywhere, and rewarded where a run's own settings say so.
grpo="data.train=$out/data/train.jsonl data.eval=$out/data/heldout.jsonl algorithm.kl_coefficient=0
    rewards.files=[examples/experiments/lessons.py] rewards.weights.well_formed=0 evaluation.accuracy=countdown
    checkpoint.every=0 tracking.samples_every=1 tracking.samples_kept=128"
export out common grpo steps

logged() {  # NAME COMMAND ...
    local begun=$SECONDS
    if "${@:2}" > "$out/$1.log" 2>&1; then
        echo "$1: $((SECONDS - begun)) s"
    else
        echo "error: $1 failed; the end of $out/$1.log:" >&2
        tail -n 5 "$out/$1.log" >&2
        return 1
    fi
}

warm_start() {  # NAME STEPS
    [ -f "$out/$1/model/config.json" ] && return
    # shellcheck disable=SC2086
    logged "$1" python -m trainer sft examples/countdown_sft.yaml $common "model.path=$out/data/model" \
        "data.train=$out/data/demonstrations.jsonl" "steps=$2" "tracking.name=$1" checkpoint.overwrite=true
}

training() {  # SEED NAME WARM_START TIMES key=value ...
    local name=$2-$1 total=$((steps * $4))
    tail -n 1 "$out/$name/metrics.jsonl" 2>/dev/null | grep -q "^{\"step\": $total," && return
    # shellcheck disable=SC2086
    logged "$name" python -m trainer train examples/countdown_cpu.yaml $common $grpo "model.path=$out/$3/model" \
        "seed=$1" "tracking.name=$name" "steps=$total" "evaluation.every=$(((total + 1) / 2))" \
        checkpoint.overwrite=true "${@:5}"
}
export -f logged training

mkdir -p "$out"
[ -f "$out/data/demonstrations.jsonl" ] || python examples/countdown.py "$out/data"
warm_start warm "${WARM_STEPS:-1400}"
warm_start weak "${WEAK_STEPS:-150}"
for seed in 0 1; do
    sed "/./s/^/$seed /" <<< "$runs"
done | xargs -L 1 -P "$jobs" bash -c 'training "$@"' training
# shellcheck disable=SC2086
logged gradient python -m examples.experiments.lessons gradient "$out" $common $grpo "model.path=$out/warm/model" \
    --prompts "${PROMPTS:-256}"
python -m examples.experiments.lessons figures "$out" --docs "$docs" | tee "$out/tables.md"
