"""A drafter's sliding-window layers made bidirectional along with the others.

Where a DFlash drafter's config says nothing, its sliding-window layers are causal and its last, full-attention layer
is bidirectional. An attention module that sets `self.is_causal = False` for every layer and has a sliding window runs
those layers in a way that they were not trained for: nothing fails, and acceptance falls. Decide by the layer's kind,
and let the config's `is_causal` say otherwise.

On: every release; drafters with sliding-window layers, silently.
Seen: the config of the DFlash drafter of Qwen3.6-27B: four such layers of five, `is_causal` absent.
Fix: none.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Confidence, Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding


class ForcedNonCausal(Rule):
    code = "DDA305"
    kind = "forced-non-causal"
    severity = Severity.SILENT
    message = (
        "this makes sliding-window layers bidirectional too, which drafters are not trained for; "
        "decide by the layer's kind, or by the config's `is_causal`"
    )
    nodes = (ast.Assign,)
    markers = ("is_causal",)
    EXAMPLES = (
        Good("""
            from torch import nn

            class Attention(nn.Module):
                def __init__(self, config, layer_idx):
                    super().__init__()
                    self.is_causal = config.layer_types[layer_idx] == "sliding_attention"
                    self.sliding_window = config.sliding_window if self.is_causal else None
        """),
        Good("""
            from torch import nn

            class Encoder(nn.Module):
                def __init__(self, config):
                    super().__init__()
                    self.is_causal = False
        """),
        Good("""
            from torch import nn

            class Attention(nn.Module):
                def __init__(self, config):
                    super().__init__()
                    self.is_causal = False
                    self.sliding_window = None
        """),
        Bad("""
            from torch import nn

            class Attention(nn.Module):
                def __init__(self, config, layer_idx):
                    super().__init__()
                    self.is_causal = False
                    self.sliding_window = config.sliding_window if config.layer_types[layer_idx] else None
        """),
        Bad("""
            from torch import nn

            class DraftAttention(nn.Module):
                def __init__(self, config, layer_idx):
                    super().__init__()
                    self.sliding_window = config.sliding_window
                    self.is_causal = False
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(), attr="is_causal")], value=ast.Constant(value=False)
            ):
                owner = file.module_class(node)
                windows = file.facts.flow.sources.get(("attribute", owner, "sliding_window"), [])
                has_window = any(w.expr is not None and not isinstance(w.expr, ast.Constant) for w in windows)
                if owner is not None and has_window:
                    fact = f"{file.source.path}:{node.lineno}: `{owner.node.name}` has a sliding window"
                    because = Value(Kind.OWN, fact, Confidence.LIKELY, (fact,))
                    reason = "which layers are to be causal is the checkpoint's say"
                    yield self.report(file, node, because, fix=reason, claim=Claim(Ask.NON_CAUSAL))
