"""scalebench: how much time does synchronising less often save, and what does it cost in accuracy?"""

__version__ = "0.1.0"
