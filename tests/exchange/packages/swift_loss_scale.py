"""Splits answers as a loss scale of ms-swift does: swift_loss_scale.py NAME ANSWERS-AS-JSON."""

import json
import sys

from swift.loss_scale import get_loss_scale

if __name__ == "__main__":
    scale = get_loss_scale(sys.argv[1])
    print(json.dumps([list(zip(*scale.get_loss_scale(answer), strict=True)) for answer in json.loads(sys.argv[2])]))
