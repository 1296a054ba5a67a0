"""Models whose layer sizes and FLOPs tell what their training would have to send.

Definitions on the meta device, where they take no memory, walked once. All but ``names`` need
torch.
"""
