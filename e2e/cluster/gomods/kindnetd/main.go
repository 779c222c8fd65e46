// Command kindnetd is a small stand-in for kind's network daemon, which is no module of its own that could be
// fetched. It keeps the contract of the manifest that kind applies: HOST_IP, POD_SUBNET, CONTROL_PLANE_ENDPOINT and
// /etc/cni/net.d. NetworkPolicies are not enforced.
package main

import (
	"context"
	"fmt"
	"log"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	conflist = "/etc/cni/net.d/10-kindnet.conflist"
	// A node's own pods: a veth pair each, an address of the node's PodCIDR, host ports where a pod asks for them.
	conflistText = `{"cniVersion": "0.3.1", "name": "kindnet", "plugins": [
  {"type": "ptp", "ipMasq": false, "mtu": 1500, "ipam": {"type": "host-local", "dataDir": "/run/cni-ipam-state",
   "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{"subnet": "%s"}]]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
`
	// What leaves the pod network takes the node's address, unless the node itself is the target.
	ruleset = `add table ip kindnet
flush table ip kindnet
add chain ip kindnet postrouting { type nat hook postrouting priority srcnat - 5; policy accept; }
add rule ip kindnet postrouting ip saddr %[1]s ip daddr != %[1]s fib daddr type != local masquerade
`
	period = 2 * time.Second
)

func main() {
	self, err := netip.ParseAddr(os.Getenv("HOST_IP"))
	if err != nil {
		log.Fatalf("HOST_IP: %v", err)
	}
	podSubnet, err := netip.ParsePrefix(os.Getenv("POD_SUBNET"))
	if err != nil {
		log.Fatalf("POD_SUBNET: %v", err)
	}
	config, err := rest.InClusterConfig()
	if err != nil {
		log.Fatal(err)
	}
	// The Service address of the API server works only after kube-proxy, which may start later than this.
	if endpoint := os.Getenv("CONTROL_PLANE_ENDPOINT"); endpoint != "" {
		config.Host = "https://" + endpoint
	}
	client := kubernetes.NewForConfigOrDie(config)
	for ; ; time.Sleep(period) {
		if err := reconcile(client, self, podSubnet); err != nil {
			log.Print(err)
		}
	}
}

// reconcile makes this node's CNI configuration, its routes to the others' pods and its masquerading.
func reconcile(client kubernetes.Interface, self netip.Addr, podSubnet netip.Prefix) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	// resourceVersion 0 is answered from the API server's cache: a few nodes, every two seconds.
	nodes, err := client.CoreV1().Nodes().List(ctx, meta.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	for _, node := range nodes.Items {
		address, found := internalAddress(&node)
		if !found || node.Spec.PodCIDR == "" {
			continue
		}
		if address == self {
			err = writeIfChanged(conflist, fmt.Sprintf(conflistText, node.Spec.PodCIDR))
		} else {
			err = route(node.Spec.PodCIDR, address)
		}
		if err != nil {
			return fmt.Errorf("node %s: %w", node.Name, err)
		}
	}
	return masquerade(ctx, podSubnet)
}

func internalAddress(node *core.Node) (netip.Addr, bool) {
	for _, item := range node.Status.Addresses {
		address, err := netip.ParseAddr(item.Address)
		if item.Type == core.NodeInternalIP && err == nil && address.Is4() {
			return address, true
		}
	}
	return netip.Addr{}, false
}

// writeIfChanged replaces the file as a whole: containerd watches the folder and must not read half of it.
func writeIfChanged(path, text string) error {
	if present, err := os.ReadFile(path); err == nil && string(present) == text {
		return nil
	}
	beside := path + ".new"
	if err := os.WriteFile(beside, []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(beside, path)
}

func route(podCIDR string, gateway netip.Addr) error {
	target, err := netlink.ParseIPNet(podCIDR)
	if err != nil {
		return err
	}
	return netlink.RouteReplace(&netlink.Route{Dst: target, Gw: gateway.AsSlice()})
}

func masquerade(ctx context.Context, podSubnet netip.Prefix) error {
	command := exec.CommandContext(ctx, "nft", "-f", "-")
	command.Stdin = strings.NewReader(fmt.Sprintf(ruleset, podSubnet))
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s", err, output)
	}
	return nil
}
