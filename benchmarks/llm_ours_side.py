"""One process of `llm_step.py` or `time_to_reward.py`: `penstock run`, as a person types it.

Run as: python llm_ours_side.py MEASURED WORD...

What the process held at most, the final checkpoint and the saved model included, goes into the JSON
file MEASURED. Torch is not imported before the command does it, which sets how its threads wait.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from penstock.launch.main import main
from vs_trl_case import peak_rss_mib

if __name__ == "__main__":
    code = main(["run", *sys.argv[2:]])
    if code:
        sys.exit(code)
    Path(sys.argv[1]).write_text(json.dumps({"peak_rss_mib": peak_rss_mib()}))
