"""Tensors that wait in the host's memory while the device's memory is needed for something else."""

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


class HostOffload:
    """Tensors that lie in the host's memory for a while. Meanwhile their storages on the device are empty."""

    def __init__(self, device: torch.device) -> None:
        self.waiting: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self.hosts: dict[int, torch.UntypedStorage] = {}  # reused: to pin memory takes longer than to copy to it
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move them to the host, unless they are there already."""
        if self.waiting:
            return
        self.wait()
        for tensor in tensors:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            key = storage._cdata
            if key not in self.hosts:
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self.stream is not None)
                self.hosts[key] = host.untyped_storage()
            self.hosts[key].copy_(storage, non_blocking=True)
            self.waiting.append((storage, self.hosts[key]))
        if self.stream is not None:
            torch.cuda.current_stream().synchronize()
        for storage, _ in self.waiting:
            storage.resize_(0)

    def reload(self) -> None:
        """Begin to bring them back while the device computes; they can be used after `wait`."""
        for storage, host in self.waiting:
            storage.resize_(host.nbytes())
        if self.stream is not None:
            # Kernels that were queued before may still use the memory that they now get back.
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for storage, host in self.waiting:
                storage.copy_(host, non_blocking=True)
        self.waiting = []

    def wait(self) -> None:
        """Let what the device computes from here on wait until they are back."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
