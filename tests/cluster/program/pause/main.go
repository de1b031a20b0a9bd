// Command pause is what a pod's sandbox runs: it holds the pod's namespaces open, buries the children that the
// pod's containers orphan when they share a process namespace, and ends when told to.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			if child, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); err != nil || child <= 0 {
				break
			}
		}
	}
}
