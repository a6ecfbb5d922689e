package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"torpor/tools/rest"
)

// row is one line of ps. The JSON names are those of the API.
type row struct {
	SandboxID   string            `json:"sandboxID"`
	TemplateID  string            `json:"templateID"`
	Public      string            `json:"public"`
	VM          half              `json:"vm"`
	Envd        half              `json:"envd"`
	Incarnation uint64            `json:"incarnation"`
	Metadata    map[string]string `json:"metadata"`
	EndAt       time.Time         `json:"endAt"`
}

// half is one of the two truths: the VM's or envd's.
type half struct {
	State  string `json:"state"`
	Reason string `json:"reason,omitempty"`
}

// psFanout bounds the state calls under way at once.
const psFanout = 8

func (a *app) psCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ps",
		Short: "List sandboxes with both truths: the VM's state and envd's readiness",
		Args:  cobra.NoArgs,
		RunE: a.withClient(func(cmd *cobra.Command, c *rest.Client, _ []string) error {
			rows, err := listRows(cmd.Context(), c)
			if err != nil {
				return err
			}
			if asJSON {
				out := json.NewEncoder(cmd.OutOrStdout())
				out.SetIndent("", "  ")
				return out.Encode(rows)
			}
			return printRows(cmd.OutOrStdout(), rows, time.Now())
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// listRows joins the list with each sandbox's state. One that ends between the two calls is left out.
func listRows(ctx context.Context, c *rest.Client) ([]row, error) {
	list, err := c.List(ctx, "")
	if err != nil {
		return nil, err
	}
	rows := make([]row, len(list))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(psFanout)
	for i, d := range list {
		group.Go(func() error {
			s, err := c.State(ctx, d.SandboxID)
			if rest.StatusOf(err) == http.StatusNotFound {
				return nil
			}
			if err != nil {
				return err
			}
			rows[i] = row{
				SandboxID: d.SandboxID, TemplateID: d.TemplateID, Public: s.Public,
				VM: half{s.VM.State, s.VM.Reason}, Envd: half{s.Envd.State, s.Envd.Error},
				Incarnation: s.Incarnation, Metadata: d.Metadata, EndAt: s.EndAt,
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(rows, func(r row) bool { return r.SandboxID == "" }), nil
}

func printRows(w io.Writer, rows []row, now time.Time) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "SANDBOX\tTEMPLATE\tPUBLIC\tVM\tENVD\tSTART\tENDS\tMETADATA")
	for _, r := range rows {
		ends := "-"
		if r.Public == "running" && !r.EndAt.IsZero() {
			ends = "in " + r.EndAt.Sub(now).Round(time.Second).String()
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\n",
			r.SandboxID, r.TemplateID, r.Public, r.VM.State, r.Envd.State, r.Incarnation, ends, pairs(r.Metadata))
	}
	return table.Flush()
}

func pairs(metadata map[string]string) string {
	out := make([]string, 0, len(metadata))
	for k, v := range metadata {
		out = append(out, fmt.Sprintf("%s=%q", k, v))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}
