"""The cable between the machine and the node, and the node's own network.

The node has a network namespace of its own. One cable (a veth pair) leads into it; the machine gets routes to
the pods' and Services' addresses through that cable, so that tests reach both. All but the machine's end of the
cable lives in the node's namespace, and that end vanishes with it.
"""

import ipaddress
import json
import time
from pathlib import Path

from tests.cluster.command import CommandFailed, run
from tests.cluster.layout import Addresses

SLOTS = 16


def claim_slot(owner: Path) -> Addresses:
    """Take the first free slot for the cluster whose state folder is ``owner``; make and sign its cable.

    Raises ``RuntimeError`` when this machine's routes leave no slot free.
    """
    for slot in range(SLOTS):
        addresses = Addresses(slot)
        if any(overlaps(addresses, route) for route in routes()):
            continue
        try:
            # Making the link is what takes the slot: of two clusters that try at once, one gets an error.
            run("ip", "link", "add", addresses.link, "type", "veth", "peer", "name", peer(addresses))
        except CommandFailed:
            continue
        run("ip", "link", "set", addresses.link, "alias", str(owner))
        return addresses
    raise RuntimeError(
        "no slot is free: other clusters or this machine's own routes use 10.88.0.0/20 to 10.96.0.0/20"
    )


def peer(addresses: Addresses) -> str:
    """Name of the cable's other end until it is moved into the node."""
    return f"{addresses.link}-node"


def routes() -> list[ipaddress.IPv4Network]:
    """Networks that this machine has a route to, the default route apart."""
    destinations = [route["dst"] for route in json.loads(run("ip", "-json", "-4", "route", "show") or "[]")]
    return [ipaddress.IPv4Network(destination) for destination in destinations if destination != "default"]


def overlaps(addresses: Addresses, route: ipaddress.IPv4Network) -> bool:
    """Whether a cluster in this slot would take addresses that ``route`` leads to."""
    ranges = [addresses.pods, addresses.services, f"{addresses.machine_end}/32"]
    return any(ipaddress.IPv4Network(wanted).overlaps(route) for wanted in ranges)


def connect(addresses: Addresses, node_process: int) -> None:
    """Put the cable's far end into the node and route the cluster's addresses through it."""
    run("ip", "link", "set", peer(addresses), "netns", str(node_process), "name", "eth0")
    run("ip", "address", "add", f"{addresses.machine_end}/30", "dev", addresses.link)
    run("ip", "link", "set", addresses.link, "up")
    for range_ in (addresses.pods, addresses.services):
        run("ip", "route", "replace", range_, "via", addresses.node_end, "dev", addresses.link, "onlink")


def cables() -> dict[str, Path | None]:
    """The machine's ends of all cables, with the state folder of the cluster that each belongs to.

    None: whoever made it has not signed it (yet).
    """
    links = json.loads(run("ip", "-json", "link", "show", "type", "veth") or "[]")
    owners = {link["ifname"]: link.get("ifalias") for link in links}
    ours = [Addresses(slot).link for slot in range(SLOTS)]
    return {link: Path(owners[link]) if owners[link] else None for link in ours if link in owners}


def disconnect(link: str) -> None:
    """Remove a cable; the kernel may have done so already when the node ended."""
    try:
        run("ip", "link", "delete", link)
    except CommandFailed:
        if link in cables():
            raise


def configure_node(addresses: Addresses) -> None:
    """Set up the network inside the node: loopback, cable, the pods' bridge, forwarding. Runs in the node."""
    run("ip", "link", "set", "lo", "up")
    wait_for_cable()
    run("ip", "address", "add", f"{addresses.node_end}/30", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")
    run("ip", "route", "add", "default", "via", addresses.machine_end)
    run("ip", "link", "add", "cni0", "type", "bridge")
    run("ip", "address", "add", f"{addresses.node}/24", "dev", "cni0")
    run("ip", "link", "set", "cni0", "up")
    settings = Path("/proc/sys/net")
    (settings / "ipv4/ip_forward").write_text("1")
    # Packets between pods on the bridge must pass the packet filter too, or the answers of a Service's pods
    # would bypass the address translation. Kernels without this file have no such bridge filter loaded.
    bridge_filter = settings / "bridge/bridge-nf-call-iptables"
    if bridge_filter.exists():
        bridge_filter.write_text("1")


def wait_for_cable() -> None:
    """Wait until ``connect`` has put the cable into the node; raises ``TimeoutError`` after 30 seconds."""
    deadline = time.monotonic() + 30
    while "eth0" not in run("ip", "-oneline", "link", "show"):
        if time.monotonic() > deadline:
            raise TimeoutError("the cable to the machine did not come")
        time.sleep(0.02)
