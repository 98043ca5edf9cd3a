"""What orders an arrival after the results of its task: the option of a kernel that its predicted time hangs on most.

Owns the names and the default, so that predictions price what the kernel does unless it is told otherwise. Read by the
kernel's options in the runtime, by the simulator and by the tuner.
"""

from typing import Literal

Arrival = Literal["release", "fence", "read_back", "relaxed"]
"""How an arrival is ordered after what the run wrote.

`release` and `fence` are sound by PTX's memory model, and wait for all copies in flight to the SM. `read_back` loads
every result again from where all SMs meet, and adds relaxed once they are there: sound on chips whose relaxed accesses
of gpu scope go to one L2, past every cache, as Hopper's do; in streaming mode, where there are no results, a word
stands for them. `relaxed` is sound only as long as runs write nothing.
"""

DEFAULT_ARRIVAL: Arrival = "read_back"
"""What a kernel does unless it is told otherwise, and what predictions and searches price."""
