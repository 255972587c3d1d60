"""The algorithm and its data: pure functions, importable without torch.distributed and without an engine."""
