"""How far a result may be from its float64 reference: the one table of the repository.

Absolute bounds for values of order one. Raising one is a decision: say why in docs/LOG.md.
"""

from __future__ import annotations

import torch

# Attention output against plain float64 attention on the same (already rounded) inputs.
ATTENTION = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}

# Logits of two decoders of the same weights; the logits of tiny random models are of order one.
LOGITS = {torch.float64: 1e-9, torch.float32: 2e-4}

# Importance, relative, against its float64 reference on the same (already rounded) queries and
# keys: softmax and pool are float32 for a bfloat16 model, too. A float64 one is rounded at the end.
IMPORTANCE = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 1e-5}

# Two scorings of one prompt in float32, relative: chunks this close to the cut may change sides.
PLAN_CUT = 1e-5
