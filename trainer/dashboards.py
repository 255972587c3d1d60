"""Copies of a run's metrics on dashboards: TensorBoard, and Weights & Biases, whose failures do not end the run."""

import json
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainer.record import valid_json


class TensorBoard:
    """Event files in the run's folder; `resolved`, the configuration, stands beside the curves."""

    def __init__(self, folder: Path, start_step: int, resolved: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what a killed run logged after the checkpoint.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1 if start_step else 0)
        self._writer.add_text("config", f"```\n{json.dumps(valid_json(resolved), indent=2)}\n```", start_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, offline where there is no login and no network; a resumed run goes on in the same one.

    Whatever it fails with is told to the user by `say`, once, and ends the copy but not the run.
    """

    def __init__(
        self, project: str, folder: Path, start_step: int, resolved: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        self._say, self._run = say, None
        try:
            self._run = self._start(project, folder, start_step, resolved)
            # A step of our own, because wandb's drops the steps that a resumed run does again.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # noqa: BLE001 - a dashboard must not end a training run
            self._give_up(error)

    def _start(self, project: str, folder: Path, start_step: int, resolved: Mapping[str, Any]) -> Any:
        import wandb

        id_file = folder / "wandb" / "id"
        id_file.parent.mkdir(exist_ok=True)
        if start_step == 0 or not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        # Silent before init: only then does a missing login raise rather than ask for a key on the terminal.
        # No viewer query: its retries outlive init_timeout and hold up the exit where the network is dead.
        settings = wandb.setup(wandb.Settings(silent=True, x_disable_viewer=True)).settings
        start = partial(
            wandb.init,
            project=project,
            name=folder.name,
            dir=str(folder),
            resume="allow",
            config=valid_json(resolved),
            # console: wandb would wrap the streams that the live display wraps. The timeouts, in seconds, bound
            # what a bad network can cost.
            settings=wandb.Settings(silent=True, console="off", init_timeout=30, finish_timeout=60),
        )
        try:
            return start(mode=os.environ.get("WANDB_MODE") or settings.mode, id=id_file.read_text())
        except Exception as error:  # noqa: BLE001 - no login, no network, a bad key: offline works without
            # Another id, because wandb holds the one of the attempt that failed.
            id_file.write_text(secrets.token_hex(4))
            run = start(mode="offline", id=id_file.read_text())
            kept = f"This run is kept offline; upload it later with: wandb sync {Path(run.dir).parent}"
            self._say(f"wandb: {_first_line(error)} {kept}")
            return run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try(lambda run: run.log({**metrics, "step": step}))

    def close(self, failed: bool) -> None:
        """Finish the run, marked as crashed where it `failed`."""
        self._try(lambda run: run.finish(exit_code=int(failed)))

    def _try(self, work: Callable[[Any], None]) -> None:
        if self._run is not None:
            try:
                work(self._run)
            except Exception as error:  # noqa: BLE001 - a dashboard must not end a training run
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        self._say(f"warning: wandb stopped ({_first_line(error)}); the run goes on and metrics.jsonl has every step.")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
