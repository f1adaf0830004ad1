"""Two sites of two hosts each: what crosses their uplinks is slow and late, and can be cut."""

import re

from paceline.lab import Host, LabError, LinkShape, sites


def round_trip(host: Host, other: Host) -> str:
    """Returns the time to another host and back, if it can be reached."""
    try:
        answer = host.run("ping", "-c", "2", "-W", "1", "-i", "0.2", other.address)
    except LabError:
        return "no answer"
    found = re.search(r"= ([\d.]+)/", answer)
    return f"{float(found[1]):.0f} ms" if found else "unknown"


link = LinkShape(rate_bits_per_s=1e9)
uplink = LinkShape(rate_bits_per_s=100e6, delay_s=0.02)
with sites(2, 2, link, uplink) as (here, there):
    first, second = here.hosts
    print("inside a site:", round_trip(first, second))
    print("between sites:", round_trip(first, there.hosts[0]))
    there.set_uplink(is_up=False)
    print("cut:", round_trip(first, there.hosts[0]))
    there.set_uplink(is_up=True)
    print("up again:", round_trip(first, there.hosts[0]))
