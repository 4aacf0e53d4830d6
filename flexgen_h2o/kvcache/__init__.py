"""The KV cache: columns (KV entries) in fixed slots, their layout and tiers, and eviction.

The words of this package:

column: one KV entry, the key and the value of one token in one layer and kv-head.
row: the columns of one sequence in one kv-head. A sequence has as many rows as the layer has
    kv-heads.
slot: room for one column of a row. A row fills its slots in turn; then each new column takes the
    slot of another one, the row's victim.
unit: the rows of one micro-batch in one layer, as slots or as state (`UnitLayout`, `KVUnit`).
part: the rows of a unit that one tier holds (`KVPart`). Its slots may be cut into segments.
record: what an eviction policy keeps of slots: positions, scores, ... (`Needs.record`).
sinks, heavy, recent: the first columns, the best ones and the newest ones that a row keeps
    (`RowBudget`). A layer's learned sinks are something else: logits without a value (`KVUnit`).
filled: slots in use. kept: columns of a prompt that stay after prefill.
whole columns: the newest columns of packed slots, which are also held as they were.
common prefix: tokens that all sequences of a block begin with; their columns are held once.
"""
