# Sourced by the examples and tests/run.sh: makes `python` one that holds this project and what it needs.
#
#   source examples/environment.sh EXTRAS        EXTRAS: "" or a list for pip such as "test" or "test,sglang"
#
# An active virtual environment is used as it is; otherwise one is made in .venv, or with PYTHON=python3.13 in
# .venv-python3.13 by that interpreter. A second start finds a stamp of what was installed and asks pip nothing.

fail() { echo "error: $*" >&2; exit 2; }

set_up() {
    local extras=$1 folder=$root/.venv${PYTHON:+-${PYTHON##*/}} python="" candidate beyond=15 pythons="3.11 to 3.14"
    # One of the packages that SGLang asks for has nothing newer.
    [[ $extras != *sglang* ]] || beyond=13 pythons="3.11 or 3.12 (SGLang has nothing newer)"
    local fits="import sys; sys.exit(not (3, 11) <= sys.version_info < (3, $beyond))"
    if [ -z "${VIRTUAL_ENV:-}" ] || [ -n "${PYTHON:-}" ]; then
        if [ ! -x "$folder/bin/python" ]; then
            for candidate in ${PYTHON:-python3.12 python3.11 python3.13 python3.14 python3}; do
                if "$candidate" -c "$fits" 2>/dev/null; then
                    python=$candidate
                    break
                fi
            done
            [ -n "$python" ] || fail "Python $pythons is needed, and ${PYTHON:-what is on the PATH} is not: install one of them."
            [ -w "$root" ] || fail "$root is not writable, so no .venv can be made there: activate an environment first."
            "$python" -m venv "$folder" 2>/dev/null ||
                { rm -rf "$folder"; fail "$python cannot make a virtual environment: install its venv module (python3-venv on Debian)."; }
        fi
        VIRTUAL_ENV=$folder
        PATH=$VIRTUAL_ENV/bin:$PATH
        export VIRTUAL_ENV PATH
        made=$folder
    fi
    unset PYTHON
    python -c "$fits" 2>/dev/null ||
        fail "Python $pythons is needed, and the environment $VIRTUAL_ENV has another: activate one that has it, or use PYTHON=python3.12."
    local stamp=$VIRTUAL_ENV/.grpo-trainer wanted
    # The path is part of it: an editable install points to one checkout.
    wanted="$root [$extras] $(cksum < "$root/setup.py")"
    grep -qxF "$wanted" "$stamp" 2>/dev/null && return
    echo "Installing into $VIRTUAL_ENV (once; a few minutes) ..."
    python -m pip install --quiet --disable-pip-version-check --editable "$root${extras:+[$extras]}" ||
        fail "pip could not install the packages of $root/setup.py: see its message above; a package index must be reachable."
    echo "$wanted" >> "$stamp"
}

# How to get into the environment, where it is one of ours and not active.
tell_environment() {
    [ -z "$made" ] || echo "To go on from here: source $(printf %q "$made/bin/activate"); python -m trainer --help"
}

# What SEED and NPROC say, as $seed and $processes, and whether the arguments go on with an earlier run, as $overwrite.
read_launch() {
    seed=${SEED:-0} processes=${NPROC:-1} overwrite=true
    [[ $processes =~ ^[1-9][0-9]*$ ]] || fail "NPROC=$processes is not a number of processes: use 1 or more."
    [[ $seed =~ ^[0-9]+$ ]] || fail "SEED=$seed is not a seed: use a whole number."
    [[ " $* " != *" checkpoint.resume=true "* ]] || overwrite=false
}

# What a run that goes on finds made is not made again.
missing() { [ "$overwrite" = true ] || [ ! -f "$1" ]; }

# Fills runs/$name: data and a random model by the command MAKER, a warm start with SFT, GRPO with what settings are left.
#
#   from_nothing MAKER SFT GRPO SETTING ...      SFT and GRPO are YAML files
from_nothing() {
    local maker=$1 warm_start=$2 grpo=$3 data=runs/$name/data
    shift 3
    if missing "$data/demonstrations.jsonl"; then
        $maker "$data" --seed "$seed"  # unquoted, since it is a command with its arguments
    fi
    if missing "runs/$name/warm-start/model/tokenizer.json"; then
        # A step of the warm start is too short to gain from a second process.
        python -m trainer sft "$warm_start" "model.path=$data/model" "seed=$seed" \
            "data.train=$data/demonstrations.jsonl" "tracking.name=$name/warm-start" checkpoint.overwrite=true
    fi
    trainer train "$grpo" "model.path=runs/$name/warm-start/model" "data.train=$data/train.jsonl" \
        "data.eval=$data/heldout.jsonl" "seed=$seed" "tracking.name=$name/grpo" "checkpoint.overwrite=$overwrite" "$@"
}

# python -m trainer on $processes processes.
trainer() {
    if [ "$processes" -gt 1 ]; then
        python -m torch.distributed.run --standalone --nproc-per-node "$processes" -m trainer "$@"
    else
        python -m trainer "$@"
    fi
}

made=""
set_up "${1:-}"

# Many small operations: a thread that spins while it waits steals the core from the one it waits for.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
