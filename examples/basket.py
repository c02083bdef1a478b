"""A shopping basket, half written: `ling complete < examples/basket.py` goes on from the last line."""


class Basket:
    """Items by name, with their price in cents and how many of each."""

    def __init__(self):
        self.prices = {}
        self.counts = {}

    def add(self, name, price, count=1):
        """Put an item into the basket."""
        if count < 1:
            raise ValueError("count must be at least 1")
        self.prices[name] = price
        self.counts[name] = self.counts.get(name, 0) + count

    def remove(self, name):
        """Take an item out of the basket."""
        if name not in self.counts:
            raise KeyError(name)
        del self.counts[name]
        del self.prices[name]

    def total(self):
        """Return the sum over all items, in cents."""
