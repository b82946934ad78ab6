"""The simulator: cost functions, the virtual clock, the closed form, the hardware catalogue and the presets."""
