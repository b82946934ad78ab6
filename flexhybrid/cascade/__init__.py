"""The cascade: small models answer what they are sure of, large ones the rest (HybridServe, Edinburgh, Sec. IV to VI).

A request goes through models in order of size. One whose confidence reaches its threshold answers; otherwise the
request goes on, to the next model or straight to a larger one. Models are black boxes: the cascade reads their outputs.
"""
