"""Routing replay: the trainer's mixture of experts takes the choices of another forward pass (R3, arXiv 2510.11370)."""
