"""Makes the modules of scripts/ importable, as they are for a script that runs there."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
