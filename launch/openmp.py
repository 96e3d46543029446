"""Set how OpenMP's waiting threads spend their time, on the command line and from Python."""

from __future__ import annotations

import os
import sys
import warnings


def spin_briefly() -> None:
    """Have waiting threads spin for a moment and then sleep, unless the environment says otherwise.

    By default they spin on, which makes a run up to a hundred times slower once anything else uses
    the same cores; if they sleep at once, waking them doubles the time of short decoding steps.
    The library reads it when torch is imported, so after that it holds for new processes alone.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return
    os.environ["GOMP_SPINCOUNT"] = "1000"
    if "torch._C" in sys.modules:
        warnings.warn(
            "torch was imported before penstock.run was looked up, so its waiting threads spin: "
            "steps are slow if anything else uses the same cores; import penstock and name "
            "penstock.run first, or set GOMP_SPINCOUNT=1000 in the environment",
            stacklevel=3,
        )
