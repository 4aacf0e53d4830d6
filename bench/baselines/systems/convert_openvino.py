"""Convert a Hugging Face folder for OpenVINO by its torch frontend: convert.py FOLDER TARGET.xml
int8|bf16.

The model's inputs are input_ids (rows, tokens), int64, and beam_idx (rows,), int32; its output the
logits of each row's last token. The KV cache is a state inside it, in the form that OpenVINO's CPU
plugin fuses with attention: read, gathered by beam_idx, concatenated. int8 is weights alone (nncf,
a scale a row). Experts are in the form that the plugin turns into products of the chosen ones
alone: all of them over copies of all tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13
from openvino.op import assign, read_value
from openvino.op.util import Variable, VariableInfo
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer


class Step(torch.nn.Module):
    """(tokens, key 0, value 0, key 1, ...) to (logits of the last token, keys and values with the
    new columns)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = DynamicCache()
        for keys, values in zip(past[::2], past[1::2], strict=True):
            layer = (
                DynamicLayer()
            )  # filled here: its own start would be traced as an empty tensor of one dimension
            layer.lazy_initialization(keys, values)
            layer.keys = keys
            layer.values = values
            cache.layers.append(layer)
        rows, tokens = input_ids.shape
        before = past[0].shape[2]
        at = torch.arange(before, before + tokens)
        seen = torch.arange(before + tokens)[None, :] <= at[:, None]
        mask = torch.where(seen, 0.0, torch.finfo(self.model.dtype).min).to(self.model.dtype)
        out = self.model(
            input_ids,
            attention_mask=mask[None, None].expand(rows, 1, -1, -1),
            past_key_values=cache,
            position_ids=at[None].expand(rows, -1),
            use_cache=True,
            logits_to_keep=1,
        )
        present = (x for layer in out.past_key_values.layers for x in (layer.keys, layer.values))
        return (out.logits[:, -1], *present)


class Experts(torch.nn.Module):
    """SwiGLU experts without biases, of (tokens, width), the chosen ones and their shares, (tokens,
    top k)."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.count = experts.num_experts
        self.act_fn = experts.act_fn
        gate, up = experts.gate_up_proj.data.chunk(2, dim=1)
        # Constants of their own: folded out of the whole they would be there twice.
        self.weights = [gate.contiguous(), up.contiguous(), experts.down_proj.data]

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        gate, up, down = (weight.transpose(1, 2) for weight in self.weights)
        width = hidden.shape[-1]
        copies = hidden.reshape(-1, width).repeat(self.count, 1).view(self.count, -1, width)
        found = torch.bmm(self.act_fn(torch.bmm(copies, gate)) * torch.bmm(copies, up), down)
        weighs = torch.zeros(hidden.shape[0], self.count, dtype=shares.dtype).scatter(
            1, chosen, shares
        )
        found = (
            found.view(self.count, 1, -1, width)
            * weighs.transpose(0, 1).view(self.count, 1, -1)[..., None]
        )
        return found.sum(dim=0).reshape(-1, width)


def convert(folder: str, target: str, dtype: torch.dtype) -> None:
    """Save the model: what the frontend makes of it shares its memory."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    ).eval()
    # Of the blocks alone: a list with their experts would keep the weights that these are made of.
    for block in [
        block
        for block in model.modules()
        if hasattr(getattr(block, "experts", None), "gate_up_proj")
    ]:
        block.experts = Experts(block.experts)
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    count = 2 * config.num_hidden_layers
    past = [torch.zeros(2, heads, 3, width, dtype=model.dtype) for _ in range(count)]
    with torch.no_grad():
        found = ov.convert_model(
            Step(model), example_input=(torch.ones(2, 5, dtype=torch.int64), *past)
        )
    found.inputs[0].get_node().set_partial_shape(ov.PartialShape([-1, -1]))
    for port in found.inputs[1:]:
        port.get_node().set_partial_shape(ov.PartialShape([-1, heads, -1, width]))
    found.inputs[0].get_tensor().set_names({"input_ids"})
    _make_stateful(found, heads, width)
    ov.save_model(found, target, compress_to_fp16=False)


def compress(target: str) -> None:
    """The saved model with weights in int8. In a file of its own first: it is read from the one
    that it replaces."""
    import nncf

    found = nncf.compress_weights(
        ov.Core().read_model(target), mode=nncf.CompressWeightsMode.INT8_SYM
    )
    small = Path(target).with_suffix(".int8.xml")
    ov.save_model(found, small, compress_to_fp16=False)
    del found
    for suffix in (".xml", ".bin"):
        small.with_suffix(suffix).rename(Path(target).with_suffix(suffix))


def _make_stateful(model: Any, heads: int, width: int) -> None:
    """Turn every input but the first, with the output of its place, into a state that starts with
    no columns."""
    tokens, *past = model.get_parameters()
    _, *present = model.get_results()
    rows = opset13.gather(
        opset13.shape_of(tokens, "i64"), opset13.constant([0]), opset13.constant(0)
    )
    shape = opset13.concat([rows, opset13.constant(np.array([heads, 0, width], np.int64))], 0)
    beams = opset13.parameter([-1], dtype=np.int32, name="beam_idx")
    beams.output(0).get_tensor().set_names({"beam_idx"})
    for index, (old, new) in enumerate(zip(past, present, strict=True)):
        kind = old.get_element_type()
        empty = opset13.broadcast(
            opset13.convert(opset13.constant(0.0, np.float32), kind.get_type_name()), shape
        )
        info = VariableInfo()
        info.data_shape = ov.PartialShape([-1, heads, -1, width])
        info.data_type = kind
        info.variable_id = f"kv{index}"
        variable = Variable(info)
        state = read_value(empty, variable)
        readers = old.output(0).get_target_inputs()
        chosen = opset13.gather(state, beams, opset13.constant(0))
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
        model.add_sinks([assign(new.input_value(0).get_node(), variable)])
    model.add_parameters([beams])
    for old, new in zip(past, present, strict=True):
        model.remove_result(new)
        model.remove_parameter(old)
    model.validate_nodes_and_infer_types()


def main() -> int:
    source, target, kind = sys.argv[1:]
    # Beside int8 weights the plugin has fast products of models in fp16, not of those in bf16 (a
    # tenth as fast).
    convert(source, target, torch.float16 if kind == "int8" else torch.bfloat16)
    if kind == "int8":
        compress(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
