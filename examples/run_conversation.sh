#!/usr/bin/env bash
# GRPO learns to converse: to find a number, from what it is told after each guess.
#
#   bash examples/run_conversation.sh                  on this machine, from nothing: a small policy, two CPU cores
#
# Arguments are settings (key=value) of the training. NAME=... names the run (conversation), SEED=... seeds it (0), and
# NPROC=... is the number of processes that train (1). A second start moves what the first one left to
# NAME/grpo.previous-1 and so on; with checkpoint.resume=true it goes on with it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=examples/environment.sh
source "$root/examples/environment.sh" ""
cd "$root"
read_launch "$@"
name=${NAME:-conversation}
from_nothing "python -m examples.conversation" examples/conversation_sft.yaml examples/conversation.yaml "$@"
tell_environment
