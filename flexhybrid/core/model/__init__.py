"""The model as the plan sees it: its shape, rotary positions, the layout of a layer's bytes."""
