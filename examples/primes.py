"""Prime numbers, half written: `ling complete < examples/primes.py` goes on from the last line."""


def is_prime(n):
    """Return True if n is a prime number."""
    if n < 2:
        return False
