"""Credits: the service calculates with integer micro-credits (1 credit = 1,000,000 micro-credits), which fit a signed
64-bit integer. Amounts enter and leave it as decimal text or exact JSON numbers, never as floats.
"""

from decimal import ROUND_HALF_UP, Decimal

MICRO = 1_000_000
MAX_MICRO = 10**15  # 1,000,000,000 credits; the sum of thousands of such amounts fits 64 bits


def to_text(micro: int) -> str:
    """``12500000`` → ``"12.5"``: up to 6 decimals, no trailing zeros, never an exponent."""
    return f"{Decimal(micro).scaleb(-6).normalize():f}"


def rounded(micro: int) -> str:
    """For people: 3 decimals at most, of less than one credit 3 significant ones; ``6147004`` → ``"6.147"``."""
    amount = Decimal(micro).scaleb(-6)
    places = 3 if abs(amount) >= 1 else 2 - amount.adjusted()
    return to_text(int(round(amount, min(6, places)).scaleb(6)))


def to_number(micro: int) -> int | Decimal:
    """The amount in credits, of a type that ``jsontext`` writes exactly."""
    return Decimal(to_text(micro)) if micro % MICRO else micro // MICRO


def parse(value: object, *, minimum: int | None = None, field: str = "amount") -> int:
    """Credits (``"12.5"``, ``Decimal("12.5")``, ``3``) as micro-credits. Raises ValueError with a message for people if
    the value is not a finite decimal, has more than 6 decimals, is out of range or is below ``minimum`` (in
    micro-credits). A float is refused, and so is text with an exponent, a plus sign or the digits of other scripts.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str, Decimal)):
        raise ValueError(f"{field} must be a number.")
    if isinstance(value, str):
        whole, point, decimals = value.removeprefix("-").partition(".")
        if not value.isascii() or not whole.isdigit() or (point and not decimals.isdigit()):
            raise ValueError(f'{field} must be decimal text, such as "25" or "12.5".')
    amount = Decimal(value)
    if not amount.is_finite():
        raise ValueError(f"{field} must be a finite number.")
    if abs(amount) > MAX_MICRO // MICRO:
        raise ValueError(f"{field} must be at most {MAX_MICRO // MICRO}.")
    exact = amount.quantize(Decimal("0.000001"))  # not by arithmetic, which rounds long amounts to 28 digits
    if exact != amount:
        raise ValueError(f"{field} may have at most 6 decimals.")
    result = int(exact.scaleb(6))
    if minimum is not None and result < minimum:
        raise ValueError(f"{field} must be at least {to_text(minimum)}.")
    return result


def parse_list(text: str) -> tuple[int, ...]:
    """Amounts above 0 that commas separate. Raises ValueError."""
    return tuple(parse(part, minimum=1) for part in map(str.strip, text.split(",")) if part)


def price(quantity: int, micro_per_thousand: int) -> int:
    """The cost in micro-credits of ``quantity`` units priced per 1,000, rounded half up."""
    return int((Decimal(quantity) * micro_per_thousand / 1000).to_integral_value(ROUND_HALF_UP))
