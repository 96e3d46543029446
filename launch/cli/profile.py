"""`penstock profile`: measure this machine, and write what was found for plans and runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError
from .hydra_app import hydra_app

__all__ = ["profile_command"]


def profile_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock profile`."""
    hydra_app("profile", arguments, _profile)
    return 0


def _profile(composed: dict[str, Any]) -> None:
    # Imported here: torch and all that follows it take seconds, and `--help` needs none of it.
    from ...configs.plan_schema import ProfileConfig
    from ...configs.validate import validated
    from ..profile.profile import profile
    from ..profile.show import calibration_text

    config = validated(ProfileConfig, composed)
    file = Path(config.output)
    if file.is_dir():
        raise ConfigError(f"'output': '{file}' is a folder; give the name of a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"'output': '{file}' cannot be written: {error.strerror}") from error
    began_s = time.monotonic()
    calibration = profile(config)
    calibration.write(file)
    print(calibration_text(calibration))
    print(f"wrote {file} after {time.monotonic() - began_s:.0f} s")
