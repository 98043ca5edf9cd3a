"""How long prefill chunks take, learned from those that ran, and so how large the next one may be."""

from __future__ import annotations


class ChunkCost:
    """A line through recent (tokens, seconds): what a chunk costs whatever its size, and what each token adds."""

    KEEP = 0.8  # weight of what was known before, at each new chunk

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._weight = self._n = self._t = self._nn = self._nt = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk that ran."""
        keep = self.KEEP
        self._weight = keep * self._weight + 1.0
        self._n = keep * self._n + tokens
        self._t = keep * self._t + seconds
        self._nn = keep * self._nn + tokens * tokens
        self._nt = keep * self._nt + tokens * seconds

    def _line(self) -> tuple[float, float]:
        """Seconds of a chunk, and of each token; where sizes were too alike to tell, all of it is each token's."""
        n, t = self._n / self._weight, self._t / self._weight
        slope = t / n
        if self._tells_apart:
            # noise may not turn the line over, nor may more than everything be per token
            spread, together = self._nn / self._weight - n * n, self._nt / self._weight - n * t
            slope = min(max(together / spread, 0.01 * slope), slope)
        return t - slope * n, slope

    @property
    def _tells_apart(self) -> bool:
        mean = self._n / self._weight
        return self._nn / self._weight - mean * mean > (0.1 * mean) ** 2

    def seconds(self, tokens: int) -> float:
        """What a chunk is expected to take; 0 before the first one."""
        if not self._weight:
            return 0.0
        fixed, each = self._line()
        if not self._tells_apart:
            tokens = max(tokens, int(self._n / self._weight))  # a smaller one may take as long
        return fixed + each * tokens

    def tokens(self, seconds: float) -> int:
        """Tokens that fit into a time: 0 before the first chunk, at most twice the recent mean after it."""
        if not self._weight:
            return 0
        fixed, each = self._line()
        return int(min(max(seconds - fixed, 0.0) / max(each, 1e-12), 2 * self._n / self._weight + 1))
