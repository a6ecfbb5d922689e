package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
)

// version is set by the linker.
var version = "dev"

// config is everything an operator may choose.
type config struct {
	Data       string
	Agent      string
	Gateway    string
	Listen     string
	Domain     string
	MaxTimeout time.Duration
	Patience   time.Duration
}

// parseConfig reads the command line. Faults are reported together.
func parseConfig(args []string, usage io.Writer) (config, error) {
	var cfg config
	flags := flag.NewFlagSet("torpor-controlplane", flag.ContinueOnError)
	flags.SetOutput(usage)
	flags.StringVar(&cfg.Data, "data", "/var/lib/torpor/controlplane", "`directory` of the database and the API key")
	flags.StringVar(&cfg.Agent, "agent", "/run/torpor/agent.sock", "unix `socket` of the agent")
	flags.StringVar(&cfg.Gateway, "gateway", "/run/torpor/gateway.sock", "unix `socket` of the agent's data plane")
	flags.StringVar(&cfg.Listen, "listen", "127.0.0.1:3000", "`address` for REST and sandbox traffic")
	flags.StringVar(&cfg.Domain, "domain", "", "`domain` of sandbox host names <port>-<id>.<domain>; its port, if any, is put into answers")
	flags.DurationVar(&cfg.MaxTimeout, "max-timeout", 30*24*time.Hour, "longest `time` a sandbox may be given at once")
	flags.DurationVar(&cfg.Patience, "patience", 10*time.Second, "how `long` a request waits for an agent that is away")
	if err := flags.Parse(args); err != nil {
		return cfg, err
	}
	if flags.NArg() > 0 {
		return cfg, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	return cfg, cfg.validate()
}

func (c config) validate() error {
	var faults []error
	for name, value := range map[string]string{"--data": c.Data, "--agent": c.Agent, "--gateway": c.Gateway} {
		if value == "" {
			faults = append(faults, fmt.Errorf("%s must not be empty", name))
		}
	}
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		faults = append(faults, fmt.Errorf("--listen must be host:port: %w", err))
	}
	if strings.ContainsAny(c.Domain, "/ ") || strings.HasPrefix(c.Domain, ".") {
		faults = append(faults, fmt.Errorf("--domain %q must be a host name, with or without a port", c.Domain))
	}
	if c.MaxTimeout < time.Second {
		faults = append(faults, fmt.Errorf("--max-timeout %v must be at least 1s", c.MaxTimeout))
	}
	if c.Patience <= 0 {
		faults = append(faults, fmt.Errorf("--patience %v must be more than 0", c.Patience))
	}
	return errors.Join(faults...)
}
