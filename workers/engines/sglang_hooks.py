"""What this project runs inside SGLang's own processes: their log and questions to their model.

SGLang calls a question like a weight loader of its own (`custom_weight_loader`): with its model and with tensors that
were sent. The last of them, a byte tensor that both processes share, takes the answer.
"""

import importlib
import json
import os
import signal
import threading
from typing import Any

import torch
from tqdm import tqdm

LOG = "GRPO_ENGINE_LOG"
"""The environment variable that names the file for what SGLang's processes print."""

TOKENIZER, STOP_STRINGS = "GRPO_ENGINE_TOKENIZER", "stop_strings"
"""The environment variable that names a model for its tokenizer, and the key of stop strings in `custom_params`."""

ANSWER_BYTES = 2**20


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process, with its output in the log: what it says last is what explains its death."""
    log = os.open(os.environ[LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # The lock that progress bars make is a semaphore that stays behind where its process is killed, which the trainer's
    # process would warn of at its end.
    tqdm.set_lock(threading.RLock())
    # A terminal and a scheduler send these to all processes, but the trainer decides when its engine ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from sglang.srt.managers.scheduler import run_scheduler_process

    if TOKENIZER in os.environ:
        end_at_stop_strings(os.environ[TOKENIZER])
    tell_no_load()
    cache_turns_once()
    answer_first()
    listen_locally()
    run_scheduler_process(*args, **kwargs)


def tell_no_load() -> None:
    """Have SGLang keep no record of its load: nobody reads it, and a kill would leave what it has in /dev/shm."""
    from sglang.srt.managers.load_snapshot import ShmLoadSnapshotWriter
    from sglang.srt.managers.scheduler import Scheduler

    begin = ShmLoadSnapshotWriter.__init__

    def __init__(self: Any, path: str, *args: Any, **kwargs: Any) -> None:
        begin(self, path, *args, **kwargs)
        os.unlink(path)

    ShmLoadSnapshotWriter.__init__ = __init__
    Scheduler.publish_load_snapshot = lambda *_, **__: None


def cache_turns_once() -> None:
    """Have what a request adds to a prefix that is cached already cached when it ends, not at its first token, too.

    Only samples of one prompt share a prefix, and that is cached before they begin: what follows is nobody else's
    until the next turn. It takes the scheduler as long as the rest that it does for a request.
    """
    from sglang.srt.managers.scheduler_components import batch_result_processor

    cache = batch_result_processor.maybe_cache_unfinished_req

    def cache_unfinished(request: Any, *args: Any, **kwargs: Any) -> None:
        if 2 * len(request.prefix_indices) < len(request.origin_input_ids):
            cache(request, *args, **kwargs)

    batch_result_processor.maybe_cache_unfinished_req = cache_unfinished


def answer_first() -> None:
    """Have samples that ended told before what they leave in the cache is put in order, for which nobody waits.

    Where many end at once, as the turns of conversations do, that is the larger part of the work.
    """
    from sglang.srt.managers.scheduler_components import batch_result_processor, output_streamer

    release, tell = batch_result_processor.release_kv_cache, output_streamer.SchedulerOutputStreamer.stream_output
    ended: list[tuple[tuple, dict[str, Any]]] = []

    def stream_output(self: Any, *args: Any, **kwargs: Any) -> None:  # of each batch, once, after all its requests
        tell(self, *args, **kwargs)
        for request, options in ended:
            release(*request, **options)
        ended.clear()

    batch_result_processor.release_kv_cache = lambda *request, **options: ended.append((request, options))
    output_streamer.SchedulerOutputStreamer.stream_output = stream_output


def listen_locally() -> None:
    """Have the store of torch that SGLang makes listen at the loopback address it asks for, not at all addresses."""
    from workers.parallel.mesh import store_at

    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function of that name hides it
    join = rendezvous._create_c10d_store

    def create(hostname: str, port: int, rank: int, world_size: int, timeout: Any, *args: Any, **kwargs: Any) -> Any:
        if rank:
            return join(hostname, port, rank, world_size, timeout, *args, **kwargs)
        return store_at(hostname, port, world_size=world_size, timeout=timeout)

    rendezvous._create_c10d_store = create


def end_at_stop_strings(model: str) -> None:
    """Have SGLang end a request with the token that completes one of its stop strings.

    SGLang's own need its tokenizer and decode the end of every request at every token; ours are searched where SGLang
    decides, token by token, whether a request is over, so that nothing is sampled beyond.
    """
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, Req

    from workers.config import ModelConfig
    from workers.engines.stop import StopSearch, StopStrings

    stops, update = StopStrings(ModelConfig(path=model)), Req.update_finish_state

    def update_finish_state(request: Any, *args: Any, **kwargs: Any) -> None:
        update(request, *args, **kwargs)
        strings = (request.sampling_params.custom_params or {}).get(STOP_STRINGS)
        if not strings or request.finished():
            return
        if not hasattr(request, "stop_search"):
            request.stop_search = StopSearch(stops, tuple(strings))
        end = request.stop_search.end(request.output_ids)
        if end is not None:
            request.finished_reason, request.finished_len = FINISH_MATCHED_STR(matched=strings[0]), end

    Req.update_finish_state = update_finish_state


def tell_names(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Answer the names of all parameters."""
    _answer(named_tensors[-1][1], [name for name, _ in model.named_parameters()])


def compare(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Answer {parameter: [elements, those that the sent weights set, those among them that were not equal before]}.

    Each parameter is emptied, loaded from what was sent by SGLang's own loader, compared with what stood there
    before, and put back: whatever way SGLang fuses and cuts weights, what differs is found, and what was sent for
    a parameter but not taken is seen missing.
    """
    from workers.models import family_of  # not needed to start

    *weights, (_, answer) = named_tensors
    parameters = dict(model.named_parameters())
    family = family_of(model.config)
    touched = {family.engine_name(name) for name, _ in weights}
    held = {name: parameters[name].detach().clone() for name in touched}
    for name in touched:
        parameters[name].data.fill_(torch.nan)
    model.load_weights(weights)
    counts = {}
    for name, before in held.items():
        sent = parameters[name].data
        is_set = ~sent.isnan()
        counts[name] = torch.stack([is_set.sum(), (is_set & (sent != before)).sum()])
        parameters[name].data.copy_(before)
    _answer(answer, {name: [parameters[name].numel(), *count.tolist()] for name, count in counts.items()})


def _answer(tensor: torch.Tensor, value: Any) -> None:
    text = json.dumps(value).encode() + b"\0"
    tensor[: len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    if tensor.is_cuda:
        torch.cuda.synchronize()


def read_answer(tensor: torch.Tensor) -> Any:
    """What a question wrote into the byte tensor that went with it."""
    return json.loads(bytes(tensor.cpu().numpy()).split(b"\0", 1)[0])
