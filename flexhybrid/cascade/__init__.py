"""Cascades of models: small models answer if they are confident, large ones the rest (HybridServe, Sec. IV to VI).

The paper is the one from Edinburgh. A request goes through models in order of size. The first model whose confidence
reaches its threshold answers; the others pass the request on, to the next model or straight to a larger one. Models are
black boxes: the cascade only reads their outputs.
"""
