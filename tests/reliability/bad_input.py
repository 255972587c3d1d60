"""The table of wrong input: what a user may get wrong, and words of the one sentence that tells him.

`refused` runs a row in this process. Run by test_bad_input.py under torchrun on two processes:

    torchrun --nproc-per-node 2 -m tests.reliability.bad_input INPUTS OUT

goes through the whole table in the folder that `make_inputs` filled, and leaves OUT/RANK.json.
"""

import contextlib
import io
import json
import logging
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import datasets
import httpx
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

import trainer.__main__
from examples.countdown import make_model, make_tokenizer


class Row(NamedTuple):
    """A command line (settings that work stand before what is `given`), and `words` of the sentence it ends with."""

    command: str
    given: str
    words: tuple[str, ...]
    without: str = ""  # a package that is not installed
    environment: dict[str, str] = {}  # variables; such a row is not run under torchrun, which sets them itself

    @property
    def name(self) -> str:
        extra = [f"without {self.without}"] * bool(self.without) + [f"{k}={v}" for k, v in self.environment.items()]
        return " ".join([self.command, self.given, *extra])


SETTINGS = r"""
actor.learning_rat=1 > actor.learning_rat > did you mean actor.learning_rate
LEARNING_RATE=1 > 'LEARNING_RATE' > --help lists all settings
actor.learning_rate=fast > actor.learning_rate takes float > 'fast'
actor.learning_rate= > actor.learning_rate takes float
actor.learning_rate=nan > actor.learning_rate=nan must be above 0
actor.learning_rate=inf > actor.learning_rate=inf must be above 0 and below inf
actor.betas=0.9 > actor.betas takes list[float], such as [a, b]
actor.betas=[0.9,fast] > actor.betas takes list[float] > 'fast'
actor.betas=[0.9] > actor.betas=[0.9] must be two numbers
actor.weight_decay=-1 > actor.weight_decay=-1.0 must be at least 0
actor.warmup_updates=-1 > actor.warmup_updates=-1 must be at least 0
actor.final_learning_rate_ratio=nan > actor.final_learning_rate_ratio=nan must be at least 0 and at most 1
actor.max_grad_norm=0 > actor.max_grad_norm=0.0 must be above 0
actor.schedule=cosin > actor.schedule='cosin' > use one of constant, linear, cosine
actor.compile=maybe > actor.compile takes bool | None
actor.tensor_parallel=0 > actor.tensor_parallel=0 must be above 0
actor.replicate=3 > actor.replicate=3 > start a multiple of 3 processes
actor.offload=[gradients] > actor.offload='gradients' > optimizer, parameters, reference
actor.lora.rank=4 actor.lora.targets=[q] > actor.lora.targets='q' > q_proj
actor.lora.rank=4 actor.lora.targets=[] > actor.lora.targets is empty > name at least one layer
actor.lora.rank=4 actor.lora.alpha=inf > actor.lora.alpha=inf must be above 0 and below inf
actor.lora.rank=4 actor.tensor_parallel=2 > actor.lora.rank=4 > use actor.tensor_parallel=1
actor=5 > actor in actor=5 must hold settings of its own
actor.max_tokens_per_microbatch=20 > 28 tokens > actor.max_tokens_per_microbatch=20 > raise it to at least 28
actor.final_learning_rate=0.1 > is called actor.final_learning_rate_ratio now
algorithm.samples_per_prompt=4 > is called batch.samples_per_prompt now
rollout.min_response_tokens=1 > rollout.min_response_tokens > is gone, leave it out
steps=0 > steps=0 must be at least 1
steps=1.5 > steps takes int | None > '1.5'
steps=${nothing} > steps > 'nothing' not found > takes int
model.path=${oc.env:NO_SUCH_VARIABLE} > model.path takes str > 'NO_SUCH_VARIABLE' not found
seed=null > seed takes int
seed=-1 > seed=-1 must be below 4294967296 and at least 0
epochs=2 > steps=2 and epochs=2.0 are both set: unset one
epochs=inf steps=null > epochs=inf must be above 0 and below inf
timeout_seconds=inf > timeout_seconds=inf must be above 0 and at most 1000000000.0
device=tpu > device='tpu' > use auto, cpu or cuda
device=cuda:1 > device='cuda:1' > use auto, cpu or cuda
model=model > model in model=model must hold settings of its own
model.path= > model.path takes str
model.path=./nowhere > model.path=./nowhere is not a folder: check the path
model.path=https://huggingface.co/Qwen/Qwen3-0.6B > model.path=https > is not a folder: check the path
'model.path=Qwen 3' > model.path=Qwen 3 > give a model that save_pretrained wrote
model.path=nobody/no-such-model > model.path=nobody/no-such-model > hub cannot be reached > a local folder
model.dtype=float64 > model.dtype='float64' > auto, bfloat16, float32
model.attention=flash > model.attention='flash' > auto, torch, flash4
model.attention=flash4 > model.attention=flash4 > not a Hopper GPU > Use auto or torch
batch=32 > batch in batch=32 must hold settings of its own
batch.samples_per_prompt=1 > batch.samples_per_prompt=1 > use 2 samples or more
batch.minibatches_per_step=3 > batch.minibatches_per_step=3 > prompts_per_step=4 > use a divisor
batch.prompts_per_step=20 > batch.prompts_per_step=20 > 16 prompts > between 1 and 16
algorithm.preset=gpso > algorithm.preset='gpso' > did you mean gspo
algorithm.preset=cispo algorithm.dual_clip=9 > algorithm.dual_clip=9 > algorithm.clip=cispo
algorithm.clip_low=-0.1 > algorithm.clip_low=-0.1 must be at least 0 and at most 1
algorithm.kl_coefficient=nan > algorithm.kl_coefficient=nan must be at least 0
algorithm.kl_estimator=k1 algorithm.kl_coefficient=0.1 > algorithm.kl_estimator=k1 > use kl_ratio=true
algorithm.correction=truncate algorithm.correction_low=3 > algorithm.correction_low=3.0 > algorithm.correction_high=2.0
algorithm.signal_reward=exact > algorithm.signal_reward='exact' > use one of digits, countdown
algorithm.teacher=nobody/no-such-model > algorithm.teacher=nobody/no-such-model > give the path of a local folder
rollout.temperature=inf > rollout.temperature=inf must be above 0 and below inf
rollout.top_p=1.5 > rollout.top_p=1.5 must be above 0 and at most 1
rollout.top_k=-1 > rollout.top_k=-1 must be at least 0
rollout.stop=</answer> > rollout.stop takes list[str], such as [a, b]
"rollout.stop=[a, '']" > rollout.stop holds '' > leave it out
'rollout.stop=["\ufffd"]' > rollout.stop holds > leave it out
rollout.engine=vllm > rollout.engine='vllm' > use one of torch, sglang
rollout.tensor_parallel=2 > rollout.tensor_parallel > need rollout.engine=sglang
'rollout.sglang={attention_backend: triton}' > rollout.sglang > need rollout.engine=sglang
rollout.release=everything > rollout.release='everything' > kv+weights
rollout.memory_fraction=1.5 > rollout.memory_fraction=1.5 must be above 0 and at most 1
rollout.max_response_tokens=600 actor.max_tokens_per_microbatch=1000 > 616 tokens > 512 positions > lower one
rollout.gap_warning=0.9 > rollout.gap_warning=0.9 must be at most rollout.gap_error=0.5
rollout.gap_error=nan > rollout.gap_error=nan must be above 0
rollout.verify_every=-1 > rollout.verify_every=-1 must be at least 0
rollout.stall_seconds=0 > rollout.stall_seconds=0.0 must be above 0
evaluation.accuracy=math > evaluation.accuracy=math > use one of digits, countdown
evaluation.samples_per_prompt=0 > evaluation.samples_per_prompt=0 must be at least 1
evaluation.temperature=0 evaluation.samples_per_prompt=4 > evaluation.temperature=0 > samples_per_prompt=1
"evaluation.answer_pattern='['" > evaluation.answer_pattern is no regular expression > correct it
checkpoint.keep=0 > checkpoint.keep=0 must be at least 1
checkpoint.keep_best=true data.eval=null > checkpoint.keep_best=true > set data.eval
checkpoint.on_full_disk=ignore > checkpoint.on_full_disk='ignore' > use one of stop, skip
checkpoint.resume=maybe > checkpoint.resume='maybe' > use one of true, false, auto
checkpoint.resume=5 > checkpoint.resume takes bool | str
checkpoint.resume=true tracking.name=null > checkpoint.resume needs tracking.name
checkpoint.resume=true checkpoint.overwrite=true > checkpoint.resume > checkpoint.overwrite=true > set one of them
checkpoint.resume=true > checkpoint.resume=true > runs/new has no checkpoint > correct tracking.name (cut_config
checkpoint.resume=true tracking.name=dnoe > runs/dnoe has no checkpoint > did you mean tracking.name=done
checkpoint.resume=true tracking.name=done > runs/done is finished > steps=2 > raise steps
checkpoint.resume=true tracking.name=done steps=3 seed=3 > seed is 3 > set it back or start a new run
checkpoint.resume=true tracking.name=done steps=3 data.train=saved > data.train has 20 prompts > set it back
checkpoint.resume=true tracking.name=done steps=3 model.path=chat > model.path > not of chat: set it back
checkpoint.resume=true tracking.name=cut_config steps=3 > runs/cut_config/config.yaml is not valid YAML > line 2
checkpoint.resume=true tracking.name=cut_metrics steps=3 > Line 2 of runs/cut_metrics/metrics.jsonl > repair or delete
checkpoint.resume=true tracking.name=damaged steps=3 > is damaged > begin anew by checkpoint.overwrite=true
tracking.name=done > runs/done has checkpoints of an earlier run > checkpoint.resume=true > choose another
tracking.folder=file > Cannot write the run to file/new > choose another tracking.folder
tracking.folder=/proc/no > Cannot write the run to /proc/no/new > choose another tracking.folder
tracking.name=NNNNNNNNNN > Cannot use runs/NNNNNNNN > (File name too long): correct the path
tracking.samples_every=-1 > tracking.samples_every=-1 must be at least 0
tracking.wandb=perhaps > tracking.wandb takes bool
--steps=5 > unrecognized arguments: --steps=5, settings are written as key=value > --help
steps =5 > 'steps' is not an override: write it as key=value
none.yaml > 'none.yaml' is not an override: write it as key=value
rewards.weights=math > rewards.weights > write rewards.weights.x=1
rewards.weights=[countdown] > rewards.weights takes dict[str, float]
rewards.weights={countdown:1} > rewards.weights > write a space after each colon
'rewards.weights={countdown: 1' > ends inside braces: quote the whole
rewards.weights.countdown=heavy > rewards.weights.countdown=heavy > takes dict[str, float]
rewards.weights.countdown=nan > rewards.weights.countdown is nan: it must be a finite number
rewards.weights.nothing=null > rewards.weights.nothing=null > it has digits, countdown
'rewards.weights={}' > rewards.weights is empty: give at least one
'rewards.weights={countdwn: 1}' > 'countdwn', the nearest is 'countdown'
rewards.weights.math=1 > 'math' needs the column 'answer' > data.columns={answer: COLUMN}
rewards.options.countdown=5 > rewards.options.countdown is 5: it must hold
rewards.options.countdown.vald=1 > 'countdown' has no option 'vald', the nearest is 'valid'
rewards.timeouts.countdwn=1 > rewards.timeouts has 'countdwn' > did you mean 'countdown'
rewards.processes=0 > rewards.processes is 0: it must be a positive number
rewards.memory_megabytes=1 > rewards.memory_megabytes is 1 > 32 or more
environments.memory_megabytes=31 > environments.memory_megabytes is 31 > 32 or more
rewards.files=graders.py > rewards.files takes list[str], such as [a, b]
rewards.files=[none.py] > rewards.files > none.py > give the path of a .py file
rewards.files=[syntax.py] > rewards.files > syntax.py > SyntaxError > correct the file
rewards.files=[leaves.py] > rewards.files > leaves.py > SystemExit > correct the file
rewards.files=[taken.py] > 'countdown' is registered twice > give one of them another name
rewards.files=[empty.py] > empty.py is listed in rewards.files but registers no reward: put @register
"""

DATA = r"""
data.train=null > data.train is not set: give it a file
data.train=[train.jsonl] > data.train takes str | None
data.train=trian.jsonl > data.train > trian.jsonl > did you mean train.jsonl
data.train=dangling.jsonl > data.train: there is no file dangling.jsonl (did you mean train.jsonl?); give
data.train=cut.jsonl > data.train: line 11 of cut.jsonl is not JSON > repair or delete the line
data.train=objects.jsonl > data.train: line 2 of objects.jsonl is not an object in braces > repair
data.train=binary.jsonl > data.train: line 1 of binary.jsonl is not JSON > repair
data.train=zeros.jsonl > data.train: line 1 of zeros.jsonl is not JSON > repair
data.train=latin.jsonl > data.train: line 1 of latin.jsonl is not JSON > can't decode byte 0xf6 > repair
data.train=utf16.jsonl > data.train > utf16.jsonl is not JSON > repair
data.train=empty.jsonl > data.train: empty.jsonl holds no rows; give a source with at least one
data.train=blank.jsonl > data.train: blank.jsonl holds no rows > repair the file
data.train=fake.parquet > data.train: fake.parquet holds no rows that can be read as parquet > repair the file
data.train=cut.json > data.train: cut.json holds no rows that can be read as json > repair the file
data.train=ragged.csv > data.train: ragged.csv holds no rows that can be read as csv > Expected 2 fields > repair
data.train=semicolons.csv > data.prompt_column names the column 'prompt' > use one of question;answer
data.train=rows.xlsx > data.train: rows.xlsx cannot be read; give one of .json, .jsonl, .parquet, .csv
data.train=nothing > data.train: nothing cannot be loaded with data.train_split=train > path of a local file
data.train=saved data.train_split=trian > data.train_split=trian > use one of train
data.train=saved_cut > data.train: saved_cut is no whole folder of save_to_disk > write or copy it again
data.train=saved_lacks > data.train: saved_lacks is no whole folder of save_to_disk > write or copy it again
data.train=nobody/no-such-data > data.train: nobody/no-such-data > hub cannot be reached > HF_HUB_OFFLINE=1
data.train=https://example.com/x.jsonl > data.train: https > is an address > download the file
data.train=null.jsonl > data.prompt_column: row 3 holds None in prompt > name a text column
data.train=number.jsonl > data.prompt_column: row 0 holds 5 in prompt > name a text column
data.train=spaces.jsonl > data.train: the prompt of row 0 is empty; remove the row
data.train=words.jsonl > tokenizer cannot read > What is 6 > use only what is in its vocabulary
data.train=no_target.jsonl > 'countdown' needs the column 'target' > data.columns={target: COLUMN}
data.train=null_target.jsonl > 'target', which holds nothing but nulls in data.train: fill it
data.eval=no_target.jsonl > 'countdown' needs the column 'target' > data.eval > data.columns={target: COLUMN}
data.eval=5 > data.eval=5 is no source: give one
data.eval=[heldout.jsonl] > data.eval=['heldout.jsonl'] is no source: give one
data.eval=cut.jsonl > data.eval: line 11 of cut.jsonl is not JSON > repair or delete the line
'data.eval={easy: {limit: 3}}' > data.eval.easy names no source: write easy: FILE
'data.eval={easy: {source: heldout.jsonl, limt: 3}}' > data.eval.easy.limt > did you mean limit
'data.eval={easy: {source: heldout.jsonl, limit: many}}' > data.eval.easy.limit='many' > it takes int
'data.eval={easy: {source: heldout.jsonl, columns: 5}}' > data.eval.easy.columns=5 > it takes dict
data.eval_limit=0 > data.eval_limit=0 leaves no rows: give at least 1 or null
data.prompt_column=question > data.prompt_column names the column 'question' > use one of prompt, numbers, target
data.template={numbrs} > data.template={numbrs} > data.template takes str
"data.template='{numbrs}'" > data.template > 'numbrs' > did you mean numbers
"data.template='{target:zz}'" > data.template cannot be filled from row 0 > correct its braces or the row
data.template='say' > data.template='say' names no column > put one in braces
'data.columns={answer: numbers.9}' > data.columns.answer: row 0 has no '9' > correct the path
data.columns=answer > data.columns > write data.columns.x=1
'data.options={size: 3}' > data.options: only a reasoning_gym task or a module:function > unset them
data.max_prompt_tokens=0 > data.max_prompt_tokens=0 must be at least 1
data.max_prompt_tokens=4 > row 0 has 6 tokens > data.max_prompt_tokens is 4 > data.too_long=drop
data.max_prompt_tokens=1 data.too_long=drop > data.max_prompt_tokens=1 > shortest has 6 tokens, so raise it
data.too_long=cut > data.too_long='cut' > use one of error, drop
data.system=x > data.system > set data.chat=true
data.chat=true > data.chat=true > set data.chat=false
data.train=messages.jsonl > data.prompt_column: row 0 holds [{ > for messages, data.chat=true
data.chat=true model.path=chat data.train=no_role.jsonl > data.prompt_column: row 0 > has the message > role and content
data.chat=true model.path=chat data.train=no_value.jsonl > data.prompt_column: row 0 > 'content': None > from and value
data.chat=true model.path=chat data.train=answered.jsonl > data.prompt_column: row 0 > by data.columns=
data.chat=true model.path=angry > chat template cannot be filled > only one turn > set data.chat=false
data.chat=true model.path=jinja > chat template cannot be filled > correct the messages or the template
data.train=rows.py > data.train: rows.py cannot be read > file.py:function
data.train=rows.py:row > data.train: rows.py has no function row > did you mean rows
data.train=nowhere.py:rows > data.train: there is no file nowhere.py > give it as file.py:function
data.train=no_such_module:rows > data.train: there is no module no_such_module > install it or give file.py:function
data.train=imports.py:rows > data.train: imports.py imports no_such_module, which is not there: install it
data.train=syntax.py:rows > data.train: syntax.py cannot be imported: SyntaxError > correct it
data.train=leaves.py:rows > data.train: leaves.py cannot be imported: SystemExit > correct it
data.train=rows.py:leaves > data.train: rows.py:leaves raised SystemExit > correct it
data.train=rows.py:raises > data.train: rows.py:raises raised KeyError > rows.py, line 2 > correct it
data.train=rows.py:texts > data.train: rows.py:texts yields 'a' as row 0; let it yield dicts
data.train=rows.py:mixed > data.train: the rows of rows.py:mixed do not share types > give each column one type
data.train=rows.py:none > data.train: rows.py:none holds no rows; give a source with at least one
data.train=rows.py:rows 'data.options={x: 1}' > data.options.x: rows.py:rows takes no such argument; correct the name
data.train=reasoning_gym:chain_smu > data.train > 'chain_smu' > did you mean chain_sum
data.train=reasoning_gym:chain_sum 'data.options={max_term: 2}' > data.options.max_term > did you mean max_terms
"""

MODELS = """
config_cut > model.path=config_cut has no config > give a model that save_pretrained wrote
config_list > model.path=config_list has no config > give a model that save_pretrained wrote
config_size > model.path=config_size has no config > 'hidden_size' > give a model that save_pretrained wrote
unknown > model.path=unknown has no config > llama9 > give a model that save_pretrained wrote
gpt2 > model.path=gpt2 is of type 'gpt2', which is not supported > use one of qwen2, qwen3, llama
activation > model.path=activation > 'gelo' > use the config.json that belongs to it
shape > gate_proj.weight has the shape (64, 32), and by config.json (99, 32) > use the config.json that belongs to it
sliding > model.path=sliding uses sliding-window attention > set use_sliding_window to false
quantized > model.path=quantized is quantized (awq) > use the folder that it was made from
other_vocabulary > model.path=other_vocabulary > vocab_size=50 > use the tokenizer that belongs to it
mute > model.path=mute has no tokenizer > save_pretrained
tokenizer_cut > tokenizer_cut/tokenizer.json is damaged or cut off > copy or download the folder again
no_eos > model.path=no_eos has no end-of-sequence token: set eos_token
index_cut > index_cut/model.safetensors.index.json is damaged or cut off > copy or download the folder again
index_list > index_list/model.safetensors.index.json is damaged or cut off > copy or download the folder again
shard > shard lacks model-00002-of-00002.safetensors > copy or download the folder again
generation_cut > generation_cut/generation_config.json is damaged or cut off > copy or download the folder again
cut > cut/model.safetensors is damaged or cut off > copy or download the folder again
header > header/model.safetensors is damaged or cut off > copy or download the folder again
pickled > pickled/model.safetensors is damaged or cut off > copy or download the folder again
weight > no weight model.layers.0.mlp.up_proj.weight (2 of > save_pretrained
nothing > model.path=nothing has no config > give a model that save_pretrained wrote
no_weights > model.path=no_weights has no *.safetensors: save it with save_pretrained
gguf > model.path=gguf is a GGUF > pip install gguf > from_pretrained('gguf', gguf_file='x.gguf')
gguf/x.gguf > model.path=gguf/x.gguf is a GGUF > from_pretrained('gguf', gguf_file='x.gguf')
bin > model.path=bin has pytorch_model.bin but no *.safetensors: convert it by > from_pretrained('bin')
adapter > model.path=adapter holds an adapter of some/base > merge_and_unload().save_pretrained('OUT')
adapter_cut > model.path=adapter_cut holds an adapter of an unknown model > merge_and_unload()
runs/done > model.path=runs/done is of a run > python -m trainer export RUN OUT
model/config.json > model.path=model/config.json is a file: give the folder that it is in
"""

FILES = """
none.yaml > none.yaml > pass the path of a YAML file
nothing > nothing > pass the path of a YAML file
steps 5 > no config file steps > pass the path of a YAML file
cut.yaml > cut.yaml is not valid YAML > line 2
twice.yaml > twice.yaml is not valid YAML > duplicate key steps
tab.yaml > tab.yaml is not valid YAML > line 2
code.yaml > code.yaml is not valid YAML > python/object
latin.yaml > latin.yaml is not valid YAML > byte 0xf6
list.yaml > list.yaml must hold `key: value` settings
dotted.yaml > 'actor.learning_rate' in dotted.yaml: in a file write actor: {learning_rate: ...}
typo.yaml > typo.yaml > did you mean rollout.temperature
old.yaml > old.yaml is called batch.epochs_per_step now
empty.yaml > No model was named: set model.path
"""

DEMONSTRATIONS = """
data.train=train.jsonl > data.response_column names the column 'response' > use one of prompt, numbers, target
data.response_column=reply > data.response_column names the column 'reply' > use one of
data.response_column=target > data.response_column: row 0 holds > name a column of text
data.train=null_response.jsonl > data.response_column: row 0 holds None in response; name a column of text
data.eval=heldout.jsonl > data.eval: data.response_column > 'response' > prompt, numbers, target
data.chat=true model.path=chat data.train=messages.jsonl > data.response_column > set it or complete the row
samples_per_step=0 > samples_per_step=0 > use at least
samples_per_step=65 > samples_per_step=65 > set it between 1 and 64
actor.max_tokens_per_microbatch=16 > longest demonstration > actor.max_tokens_per_microbatch=16 > raise it
rewards.weights.math=1 > 'rewards' in rewards.weights.math=1 > --help lists all settings
"""

COMMANDS = """
prove model.path=./nowhere > model.path=./nowhere is not a folder: check the path
prove algorithm.preset=ppo > algorithm.preset='ppo' > did you mean dppo
prove data.train=null > data.train is not set: give it a file
prove data.train=cut.jsonl > data.train: line 11 of cut.jsonl is not JSON > repair or delete the line
prove data.train=no_target.jsonl > 'countdown' needs the column 'target' > data.columns={target: COLUMN}
prove batch.prompts_per_step=20 > batch.prompts_per_step=20 > 16 prompts > between 1 and 16
data model.path= > model.path takes str
data data.train=none.jsonl > data.train: there is no file none.jsonl > give the path of a file
data model.path=no_eos > model.path=no_eos has no end-of-sequence token: set eos_token
eval > required: model > python -m trainer eval --help
eval model > data.eval is not set > name a CONFIG that has it
eval runs/done data.eval=null > data.eval is not set > name a CONFIG that has it
eval runs/done/checkpoints/step-00000002 works.yaml > is of a run > export RUN OUT
eval nothing works.yaml > nothing is neither a model nor a run
eval model works.yaml --step 1 > --step=1 is for a run
eval cut works.yaml > cut/model.safetensors is damaged or cut off > copy or download
eval model works.yaml --k 8 > --k=8 > evaluation.samples_per_prompt to 8
eval model works.yaml --k 0 > --k=0 > give --k from 1 to 1
eval model works.yaml rollout.max_response_tokens=600 > 616 tokens > 512 positions > lower one
eval model works.yaml rewards.weights.math=1 > 'math' needs the column 'answer' > data.columns={answer: COLUMN}
eval model works.yaml --k x > argument --k > 'x' > python -m trainer eval --help
eval model works.yaml --by colour > --by=colour > prompt, numbers, target
eval model works.yaml --out none/eval.json > Cannot write none/eval.json: give the name of a file
eval model works.yaml --out /proc/eval.json > Cannot use /proc/eval.json (No such file or directory): correct the path
eval model works.yaml --samples /proc/samples.jsonl > Cannot use /proc/samples.jsonl > correct the path
eval model works.yaml --samples nothing > Cannot write nothing: give the name of a file
eval model works.yaml --setp 1 > unrecognized arguments: --setp 1 > --help
eval model works.yaml timeout_seconds=inf > timeout_seconds=inf must be above 0 and at most
eval runs/demonstrations > says nothing of rewards: name a CONFIG of train
eval runs/cut_config > runs/cut_config/config.yaml > not valid YAML
eval runs/done --step last > argument --step: invalid number_or_best value: 'last' > --help
eval runs/done --step 9 > runs/done has no checkpoint of step 9: it has those of steps 2
generate nothing 1 > nothing is neither a model nor a run
generate adapter 1 > adapter holds an adapter of some/base > merge_and_unload()
generate model 1 --step 2 > --step=2 is for a run
generate nobody/no-such-model 1 > nobody/no-such-model > hub cannot be reached > give the path of a local folder
generate model > There is nothing to answer: give a PROMPT
generate model 1 2 3 > unrecognized arguments: 2 3 > python -m trainer --help
generate model 1 --temperature hot > argument --temperature > 'hot' > python -m trainer generate --help
generate model 1 --temperature nan > --temperature must be at least 0
generate model 1 --max-tokens 0 > --max-tokens at least 1
generate model 1 --system x > --system needs a chat template > write it into the prompt
generate runs/cut_config 1 > runs/cut_config/config.yaml is not valid YAML > line 2
export runs/done > required: out > python -m trainer export --help
export nothing out > nothing is not the folder of a run
export runs/done out --step 9 > runs/done has no checkpoint of step 9: it has those of steps 2
export runs/done out --dtype float8 > argument --dtype > 'float8' > 'bfloat16'
export runs/done out --shard-size big > --shard-size=big is no size: write it as 5GB
export runs/done out --adapters > has no adapters > leave out --adapters
export runs/done file > file is a file: choose another folder
export runs/done model > model is the run, or the model that it started from: choose another folder
export runs/cut_config out > runs/cut_config/config.yaml is not valid YAML > line 2
plot runs/done --out /proc/no/x.png > Cannot use /proc/no (No such file or directory): correct the path
plot nothing > nothing/metrics.jsonl holds no metrics: give the folder of a run
plot runs/done --out curve.gif > Cannot draw to curve.gif: give a name that ends in .png
algorithms gpso > 'gpso' > did you mean gspo
rewards tset > 'tset' > 'test'
rewards test countdwn > 'countdwn', the nearest is 'countdown'
rewards test --file leaves.py > leaves.py > SystemExit > correct the file
settings all > unrecognized arguments: all > --help
doctor now > unrecognized arguments: now > --help
trian works.yaml > 'trian' > 'train' > --help
"""

WITHOUT = [
    Row("train", "tracking.wandb=true", ("tracking.wandb=true", "pip install wandb"), "wandb"),
    Row("train", "tracking.tensorboard=true", ("pip install tensorboard", "tracking.tensorboard=false"), "tensorboard"),
    Row("train", "actor.lora.rank=4", ("actor.lora.rank=4", "pip install peft"), "peft"),
    Row("train", "rewards.weights.math=1", ("'math' needs", "math_verify", "install it with pip"), "math_verify"),
    Row("train", "data.train=reasoning_gym:chain_sum", ("data.train=", "pip install reasoning"), "reasoning_gym"),
    Row("plot", "runs/done", ("matplotlib", "pip install matplotlib"), "matplotlib.figure"),
]

PLACE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"}
OF_SEVERAL = PLACE | {"LOCAL_WORLD_SIZE": "8"}
TORCHRUN = "start with torchrun"
ENVIRONMENTS = [
    Row("train", "", ("WORLD_SIZE=2", TORCHRUN), "", {"WORLD_SIZE": "2"}),
    Row("train", "", ("RANK=0", "MASTER_ADDR", TORCHRUN), "", {"RANK": "0", "WORLD_SIZE": "1"}),
    Row("train", "", ("WORLD_SIZE=two", TORCHRUN), "", PLACE | {"WORLD_SIZE": "two"}),
    Row("sft", "", ("WORLD_SIZE=0", TORCHRUN), "", PLACE | {"WORLD_SIZE": "0"}),
    Row("prove", "", ("WORLD_SIZE=-1", TORCHRUN), "", {"WORLD_SIZE": "-1"}),
    Row("train", "", ("RANK=5", "WORLD_SIZE=1", TORCHRUN), "", PLACE | {"RANK": "5"}),
    Row("train", "", ("LOCAL_RANK=x", TORCHRUN), "", {"LOCAL_RANK": "x"}),
    Row("eval", "model works.yaml", ("LOCAL_WORLD_SIZE=x", TORCHRUN), "", {"LOCAL_WORLD_SIZE": "x"}),
    Row("train", "", ("MASTER_PORT=99999999", TORCHRUN), "", PLACE | {"MASTER_PORT": "99999999"}),
    Row(
        "train",
        "timeout_seconds=1",
        ("Rank 1 waited at MASTER_ADDR=127.0.0.1 MASTER_PORT=1 ", TORCHRUN),
        "",
        PLACE | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"},
    ),
    Row(
        "train",
        "actor.tensor_parallel=2",
        ("3 process(es)", "actor.tensor_parallel=2", "a multiple of 2"),
        "",
        OF_SEVERAL | {"WORLD_SIZE": "3"},
    ),
    Row(
        "train",
        "actor.tensor_parallel=4",
        ("actor.tensor_parallel=4", "num_key_value_heads=2", "divisor"),
        "",
        OF_SEVERAL | {"WORLD_SIZE": "4"},
    ),
    Row("train", "", ("batch.prompts_per_step=4", "at least 8"), "", OF_SEVERAL | {"WORLD_SIZE": "8"}),
    Row(
        "train",
        "device=cuda",
        ("device=cuda", "CUDA_VISIBLE_DEVICES=77", "correct"),
        "",
        {"CUDA_VISIBLE_DEVICES": "77"},
    ),
]


def read(command: str, table: str, before: str = "") -> list[Row]:
    """The rows of a table of `GIVEN > WORDS > WORDS` lines; where there is no `command` it begins the line."""
    rows = []
    for line in table.strip().splitlines():
        given, *words = line.split(" > ")
        of, _, rest = (command, "", before + given) if command else given.partition(" ")
        rows.append(Row(of, rest, tuple(words)))
    return rows


TABLE = [
    *read("train", SETTINGS),
    *read("train", DATA),
    *read("train", MODELS, "model.path="),
    *read("train ", FILES),
    *read("sft", DEMONSTRATIONS),
    *read("", COMMANDS),
    *WITHOUT,
    *ENVIRONMENTS,
]
"""A command with a space behind it is given as it stands, without settings that work."""

GOOD = {"prompt": "1 2 3 to 6", "numbers": [1, 2, 3], "target": 6}


def make_inputs(folder: Path, settings: dict[str, list[str]], countdown: Path) -> None:
    """Fill `folder` with what the rows name; settings: those that work, of train and sft, with data of `countdown`."""

    def lines(count: int = 20, **changes: object) -> str:
        row = {name: value for name, value in (GOOD | changes).items() if value is not ...}
        return (json.dumps(row) + "\n") * count

    def messages(*those: dict) -> str:
        return lines(prompt=list(those))

    good, user = lines(10), {"role": "user", "content": "1"}
    files = {
        "settings.json": json.dumps(settings),
        "file": "x",
        "cut.jsonl": good + good[:30],
        "objects.jsonl": lines(1) + "[1]\n",
        "binary.jsonl": bytes(range(256)),
        "zeros.jsonl": bytes(1000),
        "latin.jsonl": good.replace("to", "t\xf6").encode("latin-1"),
        "utf16.jsonl": good.encode("utf-16"),
        "empty.jsonl": "",
        "blank.jsonl": "\n\n\n",
        "fake.parquet": good,
        "cut.json": '[{"prompt": "1"',
        "ragged.csv": "prompt,target\n1 2,3\n1,2,3,4\n",
        "semicolons.csv": "question;answer\n1;2\n",
        "rows.xlsx": b"PK\x03\x04",
        "null.jsonl": lines(3) + lines(prompt=None),
        "number.jsonl": lines(prompt=5),
        "spaces.jsonl": lines(prompt="   "),
        "words.jsonl": lines(prompt="What is 6 times 7?"),
        "no_target.jsonl": lines(target=...),
        "null_target.jsonl": lines(target=None),
        "null_response.jsonl": lines(response=None),
        "messages.jsonl": messages(user),
        "no_role.jsonl": messages({"content": "1"}),
        "no_value.jsonl": messages({"from": "human", "text": "1"}),
        "answered.jsonl": messages(user, {"role": "assistant", "content": "2"}),
        "rows.py": "def raises():\n    raise KeyError('x')\ndef texts():\n    yield 'a'\ndef none():\n    return []\n"
        "def mixed():\n    yield {'prompt': '1'}\n    yield {'prompt': 3}\ndef leaves():\n    raise SystemExit(0)\n"
        "def rows(split):\n    return []\n",
        "leaves.py": "import sys\nsys.exit(0)\n",
        "syntax.py": "def rows(:\n",
        "imports.py": "import no_such_module\n",
        "empty.py": "",
        "taken.py": "from rewards import register\n@register('countdown')\ndef c(completion, row): return 0.0\n",
        "cut.yaml": "steps: [1\nseed: 2\n",
        "twice.yaml": "steps: 1\nsteps: 2\n",
        "tab.yaml": "actor:\n\tlearning_rate: 1\n",
        "code.yaml": "steps: !!python/object/apply:os.system ['true']\n",
        "latin.yaml": "model: {path: m\xf6del}\n".encode("latin-1"),
        "list.yaml": "- steps\n",
        "dotted.yaml": "actor.learning_rate: 1\n",
        "typo.yaml": "rollout: {temperatur: 1}\n",
        "old.yaml": "algorithm: {preset: dapo, epochs_per_step: 2}\n",
        "empty.yaml": "",
        "works.yaml": "device: cpu\ndata: {eval: heldout.jsonl, max_prompt_tokens: 16}\n"
        "rewards: {weights: {countdown: 1}}\nrollout: {max_response_tokens: 12}\n",
        "gguf/x.gguf": "",
        "bin/config.json": "{}",
        "bin/pytorch_model.bin": "",
        "adapter/adapter_config.json": '{"base_model_name_or_path": "some/base"}',
        "adapter_cut/adapter_config.json": '{"base',
        "runs/demonstrations/config.yaml": "steps: 1\nsamples_per_step: 8\n",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("train.jsonl", "heldout.jsonl", "graders.py", "demonstrations.jsonl"):
        shutil.copy(countdown / name, folder / name)
    (folder / "nothing").mkdir()
    (folder / "dangling.jsonl").symlink_to("nowhere.jsonl")
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list([GOOD] * 20)})
    for name in ("saved", "saved_cut", "saved_lacks"):
        saved.save_to_disk(folder / name)
    next(folder.glob("saved_cut/train/*.arrow")).write_bytes(b"x")
    next(folder.glob("saved_lacks/train/*.arrow")).unlink()
    make_models(folder, countdown / "model")
    make_runs(folder)


def make_models(folder: Path, model: Path) -> None:
    """Copies of `model` in `folder`, each with a fault."""

    def copy(name: str, **settings: object) -> Path:
        shutil.copytree(model, folder / name)
        held = json.loads((model / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(held | settings))
        return folder / name

    copy("model")
    for name, template in {
        "chat": "{{ messages }}",
        "angry": "{{ raise_exception('only one turn') }}",
        "jinja": "{{",
    }.items():
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(copy(name))
    (copy("config_cut") / "config.json").write_text('{"model_type": "qwen3", "hid')
    (copy("config_list") / "config.json").write_text("[]")
    copy("config_size", hidden_size="many")
    copy("unknown", model_type="llama9")
    copy("activation", hidden_act="gelo")
    copy("shape", intermediate_size=99)
    copy("sliding", use_sliding_window=True, layer_types=["sliding_attention"] * 2)
    copy("quantized", quantization_config={"quant_method": "awq"})
    transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1).save_pretrained(folder / "gpt2")
    make_model("qwen3", hidden=32, layers=2, feed_forward=64, vocab=50).save_pretrained(copy("other_vocabulary"))
    (copy("mute") / "tokenizer.json").unlink()
    (copy("tokenizer_cut") / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    (endless := make_tokenizer()).eos_token = None
    endless.save_pretrained(copy("no_eos"))
    (copy("index_cut") / "model.safetensors.index.json").write_text('{"weight_map": {"a"')
    (copy("index_list") / "model.safetensors.index.json").write_text("[1]")
    names = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copy("shard") / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (copy("generation_cut") / "generation_config.json").write_text('{"eos')
    weights = (model / "model.safetensors").read_bytes()
    (copy("cut") / "model.safetensors").write_bytes(weights[:-1])
    (copy("header") / "model.safetensors").write_bytes(b"\xff" * 8 + weights[8:])
    torch.save({"a": torch.zeros(2)}, copy("pickled") / "model.safetensors")
    kept = load_file(model / "model.safetensors")
    del kept["model.norm.weight"], kept["model.layers.0.mlp.up_proj.weight"]
    save_file(kept, copy("weight") / "model.safetensors")
    (copy("no_weights") / "model.safetensors").unlink()


def make_runs(folder: Path) -> None:
    """runs/done, a run of two steps as far as it is read before a model is loaded, and copies with faults."""
    checkpoint = folder / "runs/done/checkpoints/step-00000002"
    checkpoint.mkdir(parents=True)
    position = {"given": 8, "size": 16, "seed": 0, "shuffle": True}
    progress = {"step": 2, "updates": 2, "version": 2, "data": position, "files": {}}
    (checkpoint / "progress.json").write_text(json.dumps(progress))
    (folder / "runs/done/config.yaml").write_text("model: {path: model}\n" + (folder / "works.yaml").read_text())
    evaluated = {"step": 1, "eval/accuracy": 0.5, "eval/response_length/mean": 3}
    (folder / "runs/done/metrics.jsonl").write_text(json.dumps(evaluated) + "\n")
    faults = {
        "config.yaml": ("cut_config", "model: [1\nrewards: 1\n"),
        "metrics.jsonl": ("cut_metrics", '{"step": 1}\n{"st\n{}\n'),
    }
    for file, (name, text) in faults.items():
        shutil.copytree(folder / "runs/done", folder / "runs" / name)
        (folder / "runs" / name / file).write_text(text)
    shutil.copytree(folder / "runs/done", folder / "runs/damaged")
    (folder / "runs/damaged/checkpoints/step-00000002/progress.json").write_text('{"step": 2')


class Refusal(NamedTuple):
    """What came of a row: the exit code (a traceback where there is none), what stood on stderr, seconds."""

    code: int | str
    said: str
    seconds: float
    report: str  # what torchrun's own report would end with


LOADERS = ("workers.actor.load_policy", "workers.ref.load_policy", "trainer.trainer.make_engine")
LOADERS += ("trainer.generate.TorchEngine", "trainer.evaluate.start_engine")


@contextlib.contextmanager
def conditions(row: Row, report: Path) -> Iterator[io.StringIO]:
    """What a row runs under: its environment, no hub, no weights, and nothing on standard input; yields its stderr."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    silent, said = httpx.ConnectTimeout("timed out"), io.StringIO()
    handler = logging.StreamHandler(said)
    loggers = [logging.getLogger(name) for name in ("datasets", "transformers")]
    with contextlib.ExitStack() as stack:
        for name in LOADERS:
            stack.enter_context(patch(name, refuse))
        for name in ("model_info", "dataset_info"):
            stack.enter_context(patch(f"huggingface_hub.HfApi.{name}", side_effect=silent))
        stack.enter_context(patch.dict(os.environ, row.environment | {"TORCHELASTIC_ERROR_FILE": str(report)}))
        stack.enter_context(patch.dict(sys.modules, {row.without: None} if row.without else {}))
        stack.enter_context(patch("sys.stdin", io.StringIO("")))
        # Another rank than 0 waits to be ended by torchrun, which here goes on with the next row.
        stack.enter_context(patch("trainer.__main__.time", SimpleNamespace(sleep=lambda _: None, time=time.time)))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(said))
        for logger in loggers:
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
        yield said


def refused(row: Row, report: Path) -> Refusal:
    """Run a row in this process, in the folder that `make_inputs` filled."""
    works = json.loads(Path("settings.json").read_text())
    base = works["train" if row.command in ("train", "prove", "data") else row.command] if row.command in works else []
    arguments = [row.command.strip(), *base, *shlex.split(row.given.replace("N" * 10, "N" * 300))]
    report.unlink(missing_ok=True)
    began = time.monotonic()
    with conditions(row, report) as said, patch("sys.argv", ["trainer", *arguments]):
        try:
            code = trainer.__main__.main() or 0
        except SystemExit as stop:
            code = stop.code
        except BaseException as error:  # noqa: BLE001 - which the test is to show, whatever it is
            code = f"{type(error).__name__}: {error}"
        finally:
            if dist.is_initialized():  # an error leaves that to the end of the process
                dist.destroy_process_group()
    lines = [line for line in said.getvalue().splitlines(keepends=True) if not re.match(r" *\d+ s  ", line)]
    told = json.loads(report.read_text())["message"] if report.is_file() else ""
    return Refusal(code, "".join(lines), time.monotonic() - began, told)


def main() -> None:
    """Go through the table beside the other rank, and leave what came of each row."""
    inputs, out = map(Path, sys.argv[1:])
    rank, found = os.environ["RANK"], {}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    os.chdir(inputs)
    for number, row in enumerate(TABLE):
        if not row.environment:
            found[row.name] = refused(row, out / f"report-{rank}.json")
            store.set(f"row-{number}-{rank}", "done")
            store.wait([f"row-{number}-{each}" for each in (0, 1)], timedelta(seconds=120))
    (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
