import config.kernel.encryption
import config.kernel.ids
import django.db.models.deletion
import django.db.models.functions.comparison
import django.db.models.functions.datetime
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name='Endpoint',
            fields=[
                ('id', config.kernel.ids.IdField(prefix='whe', serialize=False)),
                ('url', models.CharField(max_length=2048)),
                ('secret', config.kernel.encryption.EncryptedField()),
                ('secondary_secret', config.kernel.encryption.EncryptedField(null=True)),
                ('secondary_expires_at', models.DateTimeField(null=True)),
                ('enabled', models.BooleanField(default=True)),
                ('extended_events', models.BooleanField(db_default=False, default=False)),
                ('failing', models.BooleanField(null=True)),
                ('drop_until', models.DateTimeField(null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('updated_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('deleted_at', models.DateTimeField(null=True)),
                ('user', models.ForeignKey(db_index=False, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='webhook_endpoints', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'permissions': [('disable_endpoint', 'Can disable webhook endpoints'), ('set_installation_endpoint', 'Can set up the installation endpoint')],
                'indexes': [models.Index(models.F('user'), models.F('id'), name='endpoint_by_user'), models.Index(models.F('drop_until'), condition=models.Q(('drop_until__isnull', False)), name='endpoint_dropping')],
                'constraints': [models.UniqueConstraint(condition=models.Q(('deleted_at', None)), fields=('user',), name='endpoint_one_per_user'), models.UniqueConstraint(django.db.models.functions.comparison.Coalesce('user', 0), condition=models.Q(('deleted_at', None), ('user', None)), name='endpoint_one_of_installation')],
            },
        ),
        migrations.CreateModel(
            name='Delivery',
            fields=[
                ('id', config.kernel.ids.IdField(prefix='dlv', serialize=False)),
                ('event_id', models.CharField(max_length=32)),
                ('event_type', models.CharField(max_length=40)),
                ('run_id', config.kernel.ids.RefField(max_length=32, null=True)),
                ('chat_id', config.kernel.ids.RefField(max_length=32, null=True)),
                ('request_id', models.CharField(db_default='', default='', max_length=128)),
                ('body', models.TextField()),
                ('status', models.CharField(choices=[('PENDING', 'Pending'), ('DELIVERED', 'Delivered'), ('DEAD', 'Dead')], default='PENDING', max_length=10)),
                ('attempt_count', models.PositiveSmallIntegerField(default=0)),
                ('next_attempt_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), null=True)),
                ('ready', models.BooleanField(db_default=True, default=True)),
                ('claim_id', models.CharField(max_length=32, null=True)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('finished_at', models.DateTimeField(null=True)),
                ('user', models.ForeignKey(db_index=False, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('endpoint', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='deliveries', to='webhooks.endpoint')),
            ],
            options={
                'verbose_name_plural': 'deliveries',
                'ordering': ['-created_at', '-id'],
                'indexes': [models.Index(models.F('ready'), models.F('next_attempt_at'), condition=models.Q(('status', 'PENDING')), name='delivery_due'), models.Index(models.F('ready'), models.F('endpoint'), models.F('next_attempt_at'), condition=models.Q(('status', 'PENDING')), name='delivery_due_by_endpoint'), models.Index(models.F('endpoint'), condition=models.Q(('claim_id__isnull', False), ('status', 'PENDING')), name='delivery_claimed'), models.Index(models.F('endpoint'), name='delivery_by_endpoint'), models.Index(models.F('run_id'), name='delivery_by_run'), models.Index(models.F('id'), condition=models.Q(('status', 'DEAD')), name='delivery_dead'), models.Index(models.F('user'), models.F('created_at'), models.F('id'), name='delivery_by_user'), models.Index(models.F('user'), models.F('status'), models.F('created_at'), models.F('id'), name='delivery_by_user_status'), models.Index(models.F('finished_at'), condition=models.Q(('finished_at__isnull', False)), name='delivery_finished')],
                'constraints': [models.UniqueConstraint(fields=('event_id', 'endpoint'), name='delivery_once_per_endpoint'), models.CheckConstraint(condition=models.Q(models.Q(('finished_at__isnull', True), ('next_attempt_at__isnull', False), ('status', 'PENDING')), models.Q(('finished_at__isnull', False), ('next_attempt_at__isnull', True), ('status__in', ['DELIVERED', 'DEAD'])), _connector='OR'), name='delivery_due_until_finished')],
            },
        ),
        migrations.CreateModel(
            name='Attempt',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveSmallIntegerField()),
                ('started_at', models.DateTimeField()),
                ('duration_ms', models.PositiveIntegerField()),
                ('status_code', models.PositiveSmallIntegerField(null=True)),
                ('error', models.CharField(max_length=200, null=True)),
                ('answer', models.TextField(default='')),
                ('delivery', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='attempts', to='webhooks.delivery')),
            ],
            options={
                'ordering': ['number'],
                'constraints': [models.UniqueConstraint(fields=('delivery', 'number'), name='attempt_once_per_number')],
            },
        ),
    ]
