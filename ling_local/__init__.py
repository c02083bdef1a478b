"""ling: Ling-3.0 models for one person at one workstation."""

__version__ = "0.1.0"
