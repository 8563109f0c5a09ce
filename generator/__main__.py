"""Run the generator from a checkout: `python -m generator VERB`."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
runpy.run_module("dsparkgen", run_name="__main__", alter_sys=True)
