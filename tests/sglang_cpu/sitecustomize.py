"""Lets torchvision, which SGLang imports, load without CUDA: its wheel defines these operators only there."""

import sys
from importlib.abc import MetaPathFinder

_kept = []


class _DefineOperators(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and not _kept:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)


sys.meta_path.insert(0, _DefineOperators())
