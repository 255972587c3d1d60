"""Tensors that wait in the host's memory while the device's is needed for something else."""

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


class HostOffload:
    """Tensors that lie in the host's memory for a while; their storages on the device are empty meanwhile."""

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
                self.hosts[key] = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, pin_memory=self.stream is not None
                ).untyped_storage()
            self.hosts[key].copy_(storage, non_blocking=True)
            self.waiting.append((storage, self.hosts[key]))
        if self.stream is not None:
            torch.cuda.current_stream().synchronize()
        for storage, _ in self.waiting:
            storage.resize_(0)

    def reload(self) -> None:
        """Begin to bring them back, beside what the device computes meanwhile; they can be used after `ready`."""
        for storage, host in self.waiting:
            storage.resize_(host.nbytes())
        if self.stream is not None:
            # What computes may still use memory that is theirs again now.
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for storage, host in self.waiting:
                storage.copy_(host, non_blocking=True)
        self.waiting = []

    def wait(self) -> None:
        """What the device computes from here on finds them back."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
