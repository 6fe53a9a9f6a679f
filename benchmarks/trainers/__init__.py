"""Other trainers' own preparation, for `benchmarks.peers`. Runs in the environment that `make exits` creates.

Importing this makes `bare` available, which is shared with the tests of exports. (verl installs a package named
`tests`, which hides ours.)
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "exchange" / "packages"))
