"""KV columns in fixed slots: their layout, their homes on the tiers, and which of them are kept."""
