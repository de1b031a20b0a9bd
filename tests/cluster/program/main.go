// Command testcluster is every program of a small Kubernetes node but the container runtime: the first argument
// says which one it is to be, the rest are that program's own arguments. They share most of their code, so one
// binary builds in a fraction of the time and takes a fraction of the space of seven.
package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
)

// programs maps the first argument to what runs; each returns the exit status.
var programs = map[string]func(arguments []string) int{
	"etcd":                    etcd,
	"coredns":                 coredns,
	"kube-apiserver":          command(apiserver.NewAPIServerCommand),
	"kube-controller-manager": command(controllers.NewControllerManagerCommand),
	"kube-scheduler":          command(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubelet":                 command(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
	"kube-proxy":              command(proxy.NewProxyCommand),
}

func main() {
	if len(os.Args) > 1 {
		if run, known := programs[os.Args[1]]; known {
			// The programs parse os.Args themselves and print its first word as their name.
			os.Args = os.Args[1:]
			os.Exit(run(os.Args))
		}
	}
	names := make([]string, 0, len(programs))
	for name := range programs {
		names = append(names, name)
	}
	slices.Sort(names)
	fmt.Fprintf(os.Stderr, "usage: testcluster PROGRAM [ARGUMENT...]\nprograms: %s\n", strings.Join(names, ", "))
	os.Exit(2)
}

// command makes a program of a Kubernetes component. The component is built only when it is the one to run,
// because building it registers its flags and metrics globally.
func command(build func() *cobra.Command) func([]string) int {
	return func([]string) int { return cli.Run(build()) }
}

func etcd(arguments []string) int {
	etcdmain.Main(arguments)
	return 0
}

func coredns([]string) int {
	// The order in which a query passes the plugins; only these are compiled in.
	dnsserver.Directives = []string{"bind", "health", "ready", "errors", "cache", "kubernetes"}
	coremain.Run()
	return 0
}
