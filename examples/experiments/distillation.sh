#!/usr/bin/env bash
# Lesson 6 of docs/lessons.md: the Countdown example's policy taught by a trained one, and learning from rewards.
#
#   bash examples/experiments/distillation.sh [OUT]    all of it below OUT (runs/distillation), figure and data into docs/
#   STEPS=2 DOCS=/tmp/docs bash examples/...           shorter trainings (33), figure and data to another folder
#
# A warm start, a teacher trained from it by rewards (seed 2), and from the same warm start five ways to learn with the
# seeds 0 and 1, two of them on an eighth of the responses. What is done already is left as it is. OUT/NAME.log has what a run printed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=examples/environment.sh
source "$root/examples/environment.sh" ""
out=$(realpath -m "${1:-$root/runs/distillation}")
docs=$(realpath -m "${DOCS:-$root/docs}")
cd "$root"
steps=${STEPS:-33}
common="device=cpu tracking.folder=$out checkpoint.every=0 checkpoint.overwrite=true"

training() {  # NAME SEED key=value ...
    [ -d "$out/$1/checkpoints" ] && return
    local begun=$SECONDS
    # shellcheck disable=SC2086
    python -m trainer train examples/countdown_cpu.yaml $common "model.path=$out/warm/model" \
        "data.train=$out/data/train.jsonl" "data.eval=$out/data/heldout.jsonl" algorithm.kl_coefficient=0 \
        "tracking.name=$1" "seed=$2" "steps=$steps" evaluation.every=1 "${@:3}" > "$out/$1.log" 2>&1
    echo "$1: $((SECONDS - begun)) s"
}

mkdir -p "$out"
[ -f "$out/data/demonstrations.jsonl" ] || python examples/countdown.py "$out/data"
# shellcheck disable=SC2086
[ -f "$out/warm/model/config.json" ] || python -m trainer sft examples/countdown_sft.yaml $common \
    "model.path=$out/data/model" "data.train=$out/data/demonstrations.jsonl" tracking.name=warm > "$out/warm.log" 2>&1
training teacher-2 2
[ -f "$out/teacher/config.json" ] || python -m trainer export "$out/teacher-2" "$out/teacher"
for seed in 0 1; do
    training "rewarded-$seed" "$seed"
    training "taught-$seed" "$seed" "algorithm.teacher=$out/teacher" rewards.weights.countdown=0
    training "both-$seed" "$seed" "algorithm.teacher=$out/teacher"
    training "few-rewarded-$seed" "$seed" batch.prompts_per_step=4 evaluation.every=3
    training "few-taught-$seed" "$seed" "algorithm.teacher=$out/teacher" rewards.weights.countdown=0 \
        batch.samples_per_prompt=1 algorithm.baseline=none algorithm.scale=none evaluation.every=3
done
python -m examples.experiments.lessons distillation "$out" --docs "$docs" | tee "$out/tables.md"
