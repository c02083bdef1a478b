"""Count the words of a text, half written: `ling complete < examples/words.py`."""

import sys
from collections import Counter


def read_words(path):
    """Yield the words of a file in lower case."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            for word in line.split():
                yield word.strip(".,;:!?").lower()


def most_common(words, limit=10):
    """Return the words that occur most often, with their counts."""
    counts = Counter(words)
    return counts.most_common(limit)


def main():
    """Print the most common words of the file that is named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: words.py FILE")
