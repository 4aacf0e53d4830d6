"""The KV cache: columns (KV entries) in fixed slots, their layout and tiers, and eviction."""
