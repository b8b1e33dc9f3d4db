"""Compare MTP heads with mlx-vlm's over scripted rounds on tiny checkpoints, and keep its answers.

    python plugins/qwen35/oracles/check_mtp.py              compare: oracle, stored golden, plugin
    python plugins/qwen35/oracles/check_mtp.py --update     rewrite the golden first

Runs in an environment of its own (requirements-oracles.txt). The plugin's tests read the golden and need no oracle.
Exit status 1 when a draft differs, or a logit by more than `TOLERANCE`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["MLX_SPEC_QUANTIZE_DRAFTER"] = "0"  # the oracle reads heads as they are stored

import numpy as np
from qwen35_oracles import mtp_with_mlx_vlm as oracle
from qwen35_oracles.mtp_cases import CASES, LENGTHS, differences, script, summary
from qwen35_oracles.mtp_ours import Ours, scripted_rounds

GOLDEN = Path(__file__).parent / "goldens" / "mtp_mlx_vlm.json"


def main() -> int:
    """Run every case; returns the exit status."""
    update = "--update" in sys.argv[1:]
    stored = {} if update else json.loads(GOLDEN.read_text())["answers"]
    answers, bad = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            dirs = case.write(Path(folder))
            theirs, ours = oracle.Oracle(*dirs), Ours(*dirs)
            for length in LENGTHS:
                key, ids = f"{case.name}/{length}", script(case, length)
                found, own = theirs.run(ids, length), scripted_rounds(ours, ids, length)
                answers[key] = summary(found)
                pairs = zip(
                    [row for _, rows in found for row in rows], [row for _, rows in own for row in rows], strict=True
                )
                worst = max(np.abs(a - b).max() for a, b in pairs)
                faults = [f"plugin: {d}" for d in differences(summary(own), answers[key])]
                if not update:
                    faults += [f"golden: {d}" for d in differences(answers[key], stored[key])]
                bad += bool(faults)
                print(f"mlx_vlm mtp  {key:24}logits {worst:.1e}  {'; '.join(faults) or 'equal'}")
    if update:
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(answer)}" for key, answer in answers.items())
        GOLDEN.write_text(f'{{"versions": {json.dumps(oracle.VERSIONS)},\n "answers": {{\n{lines}\n}}}}\n')
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
